"""What the router knows of each worker: who it is, how it fares, what it reported, what was placed on it."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class State(enum.Enum):
    """Whether a worker can be used; see WorkerTable."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and place, as the supervisor gave it."""

    worker_id: str
    address: str
    role: Role
    node: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker's handshake says. All but `num_blocks` and `generation` must be alike in a cluster."""

    generation: int
    model_id: str
    layout: str
    """The block layout in words; compared as it is."""
    block_tokens: int
    hash_probe: bytes
    num_blocks: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's own report."""

    queued_tokens: int = 0
    waiting_sequences: int = 0
    running_sequences: int = 0
    is_draining: bool = False


@dataclass(slots=True)
class Account:
    """What was placed on one worker and has not ended. Kept by reservations, which give back what they took."""

    reservations: int = 0
    queued_tokens: int = 0
    """Prompt tokens to prefill here, of reservations whose first token was not seen."""
    num_tokens: int = 0
    """Prompt and output tokens to hold here."""


@dataclass(slots=True)
class Worker:
    """One row."""

    info: WorkerInfo
    state: State = State.STARTING
    reason: str = ""
    facts: WorkerFacts | None = None
    load: WorkerLoad = WorkerLoad()
    account: Account = field(default_factory=Account)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens ahead: the report lags behind what was placed, and knows what others placed."""
        return max(self.load.queued_tokens, self.account.queued_tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences here, likewise."""
        return max(self.load.waiting_sequences + self.load.running_sequences, self.account.reservations)

    def holds(self, num_tokens: int) -> bool:
        """Whether its whole pool is large enough for so many tokens, and one more, which a worker asks for."""
        return self.facts is not None and num_tokens < self.facts.num_blocks * self.facts.block_tokens

    def can_finish(self, num_tokens: int, max_output_tokens: int) -> bool:
        """Whether its whole pool is large enough for all of a request that it holds.

        All that the window leaves is no wish of its own: such a request ends when the pool is full, at the latest.
        """
        if self.facts is None:
            return False
        most = num_tokens + max_output_tokens
        return most <= self.facts.num_blocks * self.facts.block_tokens or most >= self.facts.context_tokens


class WorkerTable:
    """All workers that should exist. Owned by the router's loop; plain functions.

        starting ──ready──► ready ◄──report──► draining
           ▲  └──refuse──► refused      │
           │                  │         │ lose
           └──(next handshake)┴── lost ◄┘

    Nothing is placed on a worker that is not ready. What was placed earlier stays in its account until it ends.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker_id: str) -> Worker | None:
        """Return a row, or None for an unknown id."""
        return self._workers.get(worker_id)

    def replace(self, infos: Iterable[WorkerInfo]) -> tuple[list[WorkerInfo], list[str]]:
        """Take the list of workers that exist now.

        Returns:
            Those that are new (or moved: a worker at another address is another one), and the ids of those that left.
        """
        wanted = {info.worker_id: info for info in infos}
        left = [worker_id for worker_id, row in self._workers.items() if wanted.get(worker_id) != row.info]
        for worker_id in left:
            del self._workers[worker_id]
        new = [info for worker_id, info in wanted.items() if worker_id not in self._workers]
        for info in new:
            self._workers[info.worker_id] = Worker(info)
        return new, left

    def ready(self, *roles: Role, excluded: frozenset[str] = frozenset()) -> list[Worker]:
        """Return the rows of these roles that can be used."""
        return [
            row
            for row in self._workers.values()
            if row.state is State.READY and row.info.role in roles and row.info.worker_id not in excluded
        ]

    def num_configured(self, *roles: Role) -> int:
        """Return how many workers of these roles should exist."""
        return sum(row.info.role in roles for row in self._workers.values())

    def states(self, *roles: Role) -> str:
        """Return how many workers of these roles are in which state, for people."""
        counts: dict[str, int] = {}
        for row in self._workers.values():
            if row.info.role in roles:
                counts[row.state.value] = counts.get(row.state.value, 0) + 1
        return ", ".join(f"{count} {state}" for state, count in counts.items()) or "none exists"
