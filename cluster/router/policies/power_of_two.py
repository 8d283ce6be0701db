"""The less busy of two drawn at random. See README.md."""

from random import Random

from cluster.router.policies.policy import Choice, Cost, cheapest, decode_load, prefill_load
from cluster.router.question import Candidate, Group, Question


class PowerOfTwo:
    """Looks at two candidates only, so that many routers with old reports do not all run to the same worker."""

    name = "power_of_two"

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        decode = _better_of_two(question.decode, decode_load, rng)
        if decode.prefills_itself or not len(question.prefill):
            return Choice(decode, None, f"power_of_two: {decode.worker_id} has {decode.num_sequences} sequences")
        prefill = _better_of_two(question.prefill, prefill_load, rng)
        reason = (
            f"power_of_two: {decode.worker_id} has {decode.num_sequences} sequences, "
            f"{prefill.worker_id} has {prefill.queued_tokens} tokens queued"
        )
        return Choice(decode, prefill, reason)


def _better_of_two(group: Group, cost: Cost, rng: Random) -> Candidate:
    return cheapest(rng.sample(group.members, min(2, len(group))), cost, rng)
