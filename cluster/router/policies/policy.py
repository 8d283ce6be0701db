"""What a policy is: a pure choice among candidates. See README.md."""

from collections.abc import Callable, Collection, Iterable
from random import Random
from typing import NamedTuple, Protocol

from cluster.router.estimate import PairEstimate
from cluster.router.question import Candidate, Question


class Choice(NamedTuple):
    """The answer. `reason` is for people."""

    decode: Candidate
    prefill: Candidate | None
    reason: str
    considered: Collection[PairEstimate] = ()
    """What was weighed, by a policy that reckons in seconds."""
    estimate: PairEstimate | None = None
    """Of what was chosen, by such a policy."""


class Policy(Protocol):
    """Chooses workers. Keeps no clock and does no I/O; all chance comes from `rng`."""

    name: str
    """As in the config."""

    def choose(self, question: Question, rng: Random) -> Choice:
        """Return one of the decode candidates and, unless that one prefills itself or nobody can, a prefill one."""
        ...


Cost = Callable[[Candidate], tuple[float, ...]]


def choose_each(
    question: Question, decode_cost: Cost, prefill_cost: Cost, rng: Random
) -> tuple[Candidate, Candidate | None]:
    """Return the cheapest decoder and, where one is needed, the cheapest prefiller."""
    decode = cheapest(question.decode, decode_cost, rng)
    if decode.prefills_itself or not question.prefill:
        return decode, None
    return decode, cheapest(question.prefill, prefill_cost, rng)


def cheapest(candidates: Iterable[Candidate], cost: Cost, rng: Random) -> Candidate:
    """Return a candidate of least cost; among equals chance decides, so that nobody starves for its place in a list."""
    members = list(candidates)
    costs = [cost(candidate) for candidate in members]
    least = min(costs)
    return rng.choice([candidate for candidate, its in zip(members, costs, strict=True) if its == least])


def decode_load(candidate: Candidate) -> tuple[float, ...]:
    """Return how busy a decoder is: sequences make its steps long, then their KV does."""
    return (candidate.num_sequences, candidate.num_tokens)


def prefill_load(candidate: Candidate) -> tuple[float, ...]:
    """Return how busy a prefiller is: prompt tokens ahead are the time to wait."""
    return (candidate.queued_tokens, candidate.num_sequences)
