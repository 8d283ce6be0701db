"""What a policy is: a pure choice among candidates. See README.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from cluster.router.hits import NO_HITS, Hits


@dataclass(slots=True, eq=False)
class Candidate:
    """What is known of one worker that could be chosen. Kept up to date by the WorkerTable; policies only read it."""

    worker_id: str
    prefills_itself: bool = False
    """Role `both`: a sequence that decodes here is prefilled here."""
    queued_tokens: int = 0
    """Prompt tokens waiting or being prefilled, reported or placed."""
    num_sequences: int = 0
    """Sequences waiting or running, reported or placed."""
    num_tokens: int = 0
    """Tokens whose KV it holds or will hold, of what is placed."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request to place, and who could take it. `decode` is never empty; without `prefill` the decoder prefills."""

    num_tokens: int
    num_blocks: int
    """Full blocks of the prompt."""
    decode: Sequence[Candidate]
    prefill: Sequence[Candidate]
    hits: Hits = NO_HITS
    """Leading blocks of the prompt that each is expected to hold: `hits.of(candidate.worker_id)`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer. `reason` is for people."""

    decode: Candidate
    prefill: Candidate | None
    reason: str


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


def cheapest(candidates: Sequence[Candidate], cost: Cost, rng: Random) -> Candidate:
    """Return a candidate of least cost; among equals chance decides, so that nobody starves for its place in a list."""
    costs = [cost(candidate) for candidate in candidates]
    least = min(costs)
    return rng.choice([candidate for candidate, its in zip(candidates, costs, strict=True) if its == least])


def decode_load(candidate: Candidate) -> tuple[float, ...]:
    """Return how busy a decoder is: sequences make its steps long, then their KV does."""
    return (candidate.num_sequences, candidate.num_tokens)


def prefill_load(candidate: Candidate) -> tuple[float, ...]:
    """Return how busy a prefiller is: prompt tokens ahead are the time to wait."""
    return (candidate.queued_tokens, candidate.num_sequences)
