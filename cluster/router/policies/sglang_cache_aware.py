"""As SGLang's router decides: the longest match, if it is long enough and the load in balance. See README.md."""

from random import Random

from cluster.router.policies.policy import Choice, Cost, cheapest, decode_load, prefill_load
from cluster.router.question import Candidate, Group, Question

_MATCH_MIN = 0.3
"""Share of the prompt that must be held for a match to count."""
_APART_MIN, _APART_FACTOR = 64, 1.5
"""Out of balance: the largest load exceeds the smallest by more than so many sequences and by this factor."""


class SglangCacheAware:
    """Its thresholds, on our index of what is really cached instead of its tree of what was sent.

    Without a match it would take the worker whose tree is the smallest, to spread prompts over caches; here that is the
    worker with the least held, or in queue.
    """

    name = "sglang_cache_aware"

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        decode, why = _pick(question, question.decode, decode_load, rng)
        if decode.prefills_itself or not len(question.prefill):
            return Choice(decode, None, f"sglang_cache_aware: {decode.worker_id} {why}")
        prefill, why_prefill = _pick(question, question.prefill, prefill_load, rng)
        reason = f"sglang_cache_aware: {decode.worker_id} {why}, {prefill.worker_id} {why_prefill}"
        return Choice(decode, prefill, reason)


def _pick(question: Question, group: Group, load: Cost, rng: Random) -> tuple[Candidate, str]:
    counts = [candidate.num_sequences for candidate in group]
    if max(counts) - min(counts) > _APART_MIN and max(counts) > _APART_FACTOR * min(counts):
        return cheapest(group, lambda candidate: (candidate.num_sequences,), rng), "restores the balance"
    hits = question.hits
    most = max((hits.of(candidate.worker_id) for candidate in group), default=0)
    if question.num_blocks and most > _MATCH_MIN * question.num_blocks:
        best = cheapest(group, lambda candidate: (-hits.of(candidate.worker_id),), rng)
        return best, f"holds {most} of {question.num_blocks} blocks"
    return cheapest(group, load, rng), "has the most room"
