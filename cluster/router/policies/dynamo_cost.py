"""As Dynamo's KV router decides: overlap against load, drawn by softmax. See README.md."""

import math
from collections.abc import Sequence
from random import Random

from cluster.router.policies.policy import Choice
from cluster.router.question import Candidate, Question

_OVERLAP_WEIGHT = 1.0
_TEMPERATURE = 0.0
"""Of the softmax over normalised costs; 0: the least, and chance among equals."""


class DynamoCost:
    """Cost in blocks: weight x blocks to compute + blocks under way, for each worker.

    Where prefill is apart, the decoder is chosen by the blocks of its sequences alone and the prefiller by those to
    compute; a worker that does both is charged with both.
    """

    name = "dynamo_cost"

    def __init__(self, overlap_weight: float = _OVERLAP_WEIGHT, temperature: float = _TEMPERATURE) -> None:
        self._overlap_weight = overlap_weight
        self._temperature = temperature

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        is_apart = len(question.prefill) > 0
        decode, cost = self._draw(question.decode.members, self._decode_costs(question, is_apart), rng)
        if decode.prefills_itself or not is_apart:
            return Choice(decode, None, f"dynamo_cost: {decode.worker_id} costs {cost:.4g} blocks")
        prefill, its = self._draw(
            question.prefill.members, self._prefill_costs(question, question.prefill.members), rng
        )
        reason = f"dynamo_cost: {decode.worker_id} costs {cost:.4g} blocks, {prefill.worker_id} {its:.4g}"
        return Choice(decode, prefill, reason)

    def _decode_costs(self, question: Question, is_apart: bool) -> list[float]:
        members = question.decode.members
        held = [candidate.num_tokens / question.block_tokens for candidate in members]
        if is_apart:
            return held
        return [old + new for old, new in zip(held, self._prefill_costs(question, members), strict=True)]

    def _prefill_costs(self, question: Question, candidates: Sequence[Candidate]) -> list[float]:
        hits, block_tokens = question.hits, question.block_tokens
        return [
            self._overlap_weight
            * (question.num_blocks - hits.of(candidate.worker_id) + candidate.queued_tokens / block_tokens)
            for candidate in candidates
        ]

    def _draw(self, candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> tuple[Candidate, float]:
        least, most = min(costs), max(costs)
        if self._temperature <= 0 or least == most:
            return rng.choice([pair for pair in zip(candidates, costs, strict=True) if pair[1] == least])
        scale = self._temperature * (most - least)
        weights = [math.exp((least - cost) / scale) for cost in costs]
        return rng.choices(list(zip(candidates, costs, strict=True)), weights)[0]
