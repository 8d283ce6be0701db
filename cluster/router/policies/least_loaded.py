"""The least busy. See README.md."""

from random import Random

from cluster.router.policies.policy import Choice, choose_each, decode_load, prefill_load
from cluster.router.question import Question


class LeastLoaded:
    """Ignores caches."""

    name = "least_loaded"

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        decode, prefill = choose_each(question, decode_load, prefill_load, rng)
        reason = f"least_loaded: {decode.worker_id} has {decode.num_sequences} sequences"
        if prefill is not None:
            reason += f", {prefill.worker_id} has {prefill.queued_tokens} tokens queued"
        return Choice(decode, prefill, reason)
