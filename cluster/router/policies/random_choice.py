"""Anybody. See README.md."""

from random import Random

from cluster.router.policies.policy import Choice, choose_each
from cluster.router.question import Candidate, Question


class RandomChoice:
    """Knows nothing, and needs to know nothing."""

    name = "random"

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        decode, prefill = choose_each(question, _alike, _alike, rng)
        return Choice(decode, prefill, "random")


def _alike(candidate: Candidate) -> tuple[float, ...]:  # noqa: ARG001 - a cost has it
    return ()
