"""All workers that should exist, and which of them can be used for what."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.router.fetch_model import STARTING_TOKEN_S
from cluster.router.question import TrackedGroup
from cluster.router.room import AHEAD_S, Fulls
from cluster.router.step_model import STARTING, StepLearner, StepModel
from cluster.router.token_time import TokenTime
from cluster.router.worker import Role, State, Worker, WorkerInfo


@dataclass(frozen=True, slots=True)
class Ready:
    """The workers that can be used for one part of a request, until something changes."""

    workers: Sequence[Worker]
    candidates: TrackedGroup
    pool_tokens: int
    """Of the smallest pool."""
    context_tokens: int
    """The largest window."""

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> "Ready":
        """Return these workers, all of which have facts."""
        facts = [worker.facts for worker in workers if worker.facts is not None]
        return cls(
            workers,
            TrackedGroup([worker.candidate for worker in workers]),
            min((fact.pool_tokens for fact in facts), default=0),
            max((fact.context_tokens for fact in facts), default=0),
        )

    def all_finish(self, num_tokens: int, max_output_tokens: int) -> bool:
        """Whether each of them holds such a request and can finish it: the common case, seen at a glance."""
        most = num_tokens + max_output_tokens
        return num_tokens < self.pool_tokens and (most <= self.pool_tokens or most >= self.context_tokens)


class WorkerTable:
    """All workers that should exist. Owned by the router's loop; plain functions.

        starting ──ready──► ready ◄──report──► draining
           ▲  └──refuse──► refused      │
           │                  │         │ lose
           └──(next handshake)┴── lost ◄┘

    Nothing is placed on a worker that is not ready. What was placed earlier stays in its account until it ends.
    """

    def __init__(self, ahead_s: float = AHEAD_S, step: StepModel = STARTING) -> None:
        self.fulls = Fulls()
        self._ahead_s = ahead_s
        self._workers: dict[str, Worker] = {}
        self._elders, self._fetch_elders = StepLearner(step), TokenTime(STARTING_TOKEN_S)
        self._ready: dict[tuple[Role, ...], Ready] = {}
        self.absent: tuple[WorkerInfo, ...] = ()
        """Those that should exist and have no process now; they have no row."""

    @property
    def rows(self) -> Mapping[str, Worker]:
        """All rows by id."""
        return self._workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker_id: str) -> Worker | None:
        """Return a row, or None for an unknown id."""
        return self._workers.get(worker_id)

    def replace(
        self, infos: Iterable[WorkerInfo], absent: Iterable[WorkerInfo] = ()
    ) -> tuple[list[WorkerInfo], list[str]]:
        """Take the list of workers that exist now, and of those that should besides.

        Returns:
            Those that are new (or moved: a worker at another address is another one), and the ids of those that left.
        """
        self.absent = tuple(absent)
        wanted = {info.worker_id: info for info in infos}
        left = [worker_id for worker_id, row in self._workers.items() if wanted.get(worker_id) != row.info]
        self._forget_ready()
        for worker_id in left:
            self._workers.pop(worker_id).leave()
        new = [info for worker_id, info in wanted.items() if worker_id not in self._workers]
        for info in new:
            self._workers[info.worker_id] = Worker(
                info,
                elders=self._elders,
                fetch_elders=self._fetch_elders,
                ahead_s=self._ahead_s,
                fulls=self.fulls,
            )
        return new, left

    def move(self, worker: Worker, state: State, reason: str = "") -> None:
        """Change a row's state."""
        worker.state, worker.reason = state, reason
        self._forget_ready()

    def ready(self, *roles: Role) -> Ready:
        """Return the rows of these roles that can be used."""
        ready = self._ready.get(roles)
        if ready is None:
            rows = [row for row in self._workers.values() if row.state is State.READY and row.info.role in roles]
            ready = self._ready[roles] = Ready.of(rows)
            self.fulls.groups.append(ready.candidates)
        return ready

    def _forget_ready(self) -> None:
        self._ready.clear()
        self.fulls.groups.clear()

    def num_ready(self, *roles: Role) -> int:
        """Return how many workers of these roles can be used."""
        return len(self.ready(*roles).workers)

    def num_configured(self, *roles: Role) -> int:
        """Return how many workers of these roles should exist."""
        here = sum(row.info.role in roles for row in self._workers.values())
        return here + sum(info.role in roles for info in self.absent)

    def states(self, *roles: Role) -> str:
        """Return how many workers of these roles are in which state, for people."""
        counts: dict[str, int] = {}
        for row in self._workers.values():
            if row.info.role in roles:
                counts[row.state.value] = counts.get(row.state.value, 0) + 1
        if absent := sum(info.role in roles for info in self.absent):
            counts["absent"] = absent
        return ", ".join(f"{count} {state}" for state, count in counts.items()) or "none exists"
