"""Explanations as messages."""

from collections.abc import Sequence

from baton_pb.v1 import router_pb2
from cluster.router.estimate import PairEstimate
from cluster.router.explanations import Explanation

_PAIRS_MAX = 8
"""Pairs that are shown: the cheapest, and what was chosen."""


def explanations_to_pb(explanations: Sequence[Explanation], policy: str) -> router_pb2.ExplainReply:
    """Encode a request's placements."""
    return router_pb2.ExplainReply(placements=[_explanation_to_pb(each, policy) for each in explanations])


def _explanation_to_pb(explanation: Explanation, policy: str) -> router_pb2.PlacementExplanation:
    pairs = [_pair_to_pb(pair, explanation) for pair in explanation.considered]
    pairs.sort(key=lambda pair: pair.total_s)
    shown = [pair for place, pair in enumerate(pairs) if place < _PAIRS_MAX or pair.is_chosen]
    return router_pb2.PlacementExplanation(
        request_id=explanation.request_id,
        policy=policy,
        reason=explanation.reason,
        decode_worker_id=explanation.decode_worker_id,
        prefill_worker_id=explanation.prefill_worker_id,
        predicted_ttft_s=explanation.predicted_ttft_s,
        observed_ttft_s=explanation.observed_ttft_s,
        considered=shown,
    )


def _pair_to_pb(pair: PairEstimate, explanation: Explanation) -> router_pb2.ConsideredPair:
    prefill = None if pair.prefill is None else pair.prefill.worker_id
    return router_pb2.ConsideredPair(
        decode_worker_id=pair.decode.worker_id,
        prefill_worker_id=prefill,
        is_chosen=pair.decode.worker_id == explanation.decode_worker_id and prefill == explanation.prefill_worker_id,
        meets_targets=pair.meets_targets,
        total_s=pair.total_s,
        ttft_s=pair.first.ttft_s,
        tpot_s=pair.then.tpot_s,
        cached_tokens=pair.first.num_cached,
        terms=[router_pb2.CostTerm(name=name, seconds=seconds) for name, seconds in pair.terms().items()],
    )
