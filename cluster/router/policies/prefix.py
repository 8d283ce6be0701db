"""Where most of the prompt is cached. See README.md."""

from random import Random

from cluster.router.policies.policy import Choice, choose_each, decode_load, prefill_load
from cluster.router.question import Candidate, Question


class Prefix:
    """Most cached blocks, then least load, for the decoder and the prefiller each."""

    name = "prefix"

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        hits = question.hits

        def decode_cost(candidate: Candidate) -> tuple[float, ...]:
            return (-hits.of(candidate.worker_id), *decode_load(candidate))

        def prefill_cost(candidate: Candidate) -> tuple[float, ...]:
            return (-hits.of(candidate.worker_id), *prefill_load(candidate))

        decode, prefill = choose_each(question, decode_cost, prefill_cost, rng)
        holders = [decode] if prefill is None else [decode, prefill]
        held = ", ".join(f"{holder.worker_id} holds {hits.of(holder.worker_id)}" for holder in holders)
        return Choice(decode, prefill, f"prefix: {held} of {question.num_blocks} blocks")
