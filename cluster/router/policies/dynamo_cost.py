"""As Dynamo's KV router decides: overlap against load. See README.md."""

from collections.abc import Sequence
from random import Random

from cluster.router.policies.policy import Choice
from cluster.router.question import Candidate, Question

_OVERLAP_WEIGHT = 1.0


class DynamoCost:
    """Cost in blocks: weight x blocks to compute + blocks under way, for each worker.

    Where prefill is apart, the decoder is chosen by the blocks of its sequences alone and the prefiller by those to
    compute; a worker that does both is charged with both. The least is taken, chance decides among equals: so
    does Dynamo's softmax at its default temperature, 0.
    """

    name = "dynamo_cost"

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        is_apart = len(question.prefill) > 0
        decode, cost = _least(question.decode.members, _decode_costs(question, is_apart), rng)
        if decode.prefills_itself or not is_apart:
            return Choice(decode, None, f"dynamo_cost: {decode.worker_id} costs {cost:.4g} blocks")
        prefill, its = _least(question.prefill.members, _prefill_costs(question, question.prefill.members), rng)
        reason = f"dynamo_cost: {decode.worker_id} costs {cost:.4g} blocks, {prefill.worker_id} {its:.4g}"
        return Choice(decode, prefill, reason)


def _decode_costs(question: Question, is_apart: bool) -> list[float]:
    members = question.decode.members
    held = [candidate.num_tokens / question.block_tokens for candidate in members]
    if is_apart:
        return held
    return [old + new for old, new in zip(held, _prefill_costs(question, members), strict=True)]


def _prefill_costs(question: Question, candidates: Sequence[Candidate]) -> list[float]:
    hits, block_tokens = question.hits, question.block_tokens
    return [
        _OVERLAP_WEIGHT * (question.num_blocks - hits.of(candidate.worker_id) + candidate.queued_tokens / block_tokens)
        for candidate in candidates
    ]


def _least(candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> tuple[Candidate, float]:
    least = min(costs)
    return rng.choice([pair for pair in zip(candidates, costs, strict=True) if pair[1] == least])
