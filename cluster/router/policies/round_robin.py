"""Everybody in turn. See README.md."""

from random import Random

from cluster.router.policies.policy import Choice, choose_each
from cluster.router.question import Candidate, Question


class RoundRobin:
    """Takes the worker that was taken longest ago; one never taken comes first."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        decode, prefill = choose_each(question, self._last_turn, self._last_turn, rng)
        self._turn += 1
        for chosen in (decode, prefill):
            if chosen is not None:
                self._last[chosen.worker_id] = self._turn
        return Choice(decode, prefill, f"round_robin: turn {self._turn}")

    def _last_turn(self, candidate: Candidate) -> tuple[float, ...]:
        return (self._last.get(candidate.worker_id, 0),)
