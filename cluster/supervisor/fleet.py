"""Which processes should exist and what to do next: a pure state machine without Ray, clock or I/O.

Events go in (started, failed, time has come), actions come out. The supervisor carries the actions out.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

RESTART_BACKOFF_MAX_S = 30.0


class Role(Enum):
    """What a process does."""

    ROUTER = "router"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def is_worker(self) -> bool:
        """Whether the router has to know of it."""
        return self not in (Role.ROUTER, Role.GATEWAY)


PROBE = "probe"
"""Name of the further address at which a process's health is asked for, when it is not the main one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs and listens."""

    address: str
    node: str
    pid: int
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def probe_address(self) -> str:
        """Where to ask for its health."""
        return self.extra.get(PROBE, self.address)


@dataclass(frozen=True, slots=True)
class Member:
    """One process that should exist; its name outlives its restarts."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Launch:
    """Create the member's process. `life` counts its processes from 1 and marks all events of this one."""

    member: Member
    life: int
    address: str | None
    """Where the previous life listened: listen there again. None: anywhere, as configured."""
    router_address: str | None
    """The gateway needs it."""
    extra: dict[str, str] = field(default_factory=dict)
    """Further addresses of the previous life, by name, to listen at again."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the router that these workers exist, all of them."""

    router_address: str
    workers: tuple[tuple[Member, Place], ...]
    absent: tuple[Member, ...] = ()
    """Workers that should exist besides: without them it would not know that anything is missing."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A process did not come up at the first try of the whole fleet: starting it again would fail again."""

    name: str
    reason: str


Action = Launch | Publish | GiveUp


class Phase(Enum):
    """A member's state. See `Fleet`."""

    BLOCKED = "blocked"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"


@dataclass(frozen=True, slots=True)
class MemberState:
    """A snapshot of one member."""

    member: Member
    phase: Phase
    life: int = 0
    place: Place | None = None
    """Of the present life when ready, of the last one otherwise."""
    failures: int = 0
    """In a row: a life that lasted long enough ends the row."""
    since: float = 0.0
    """When the phase began, seconds of the caller's clock."""
    wake_at: float | None = None
    """When a backoff ends."""


class Fleet:
    """Desired members and their lives.

        blocked ──router is known──► starting ──started──► ready
           (gateway only)              ▲  │                  │
                                       │  └──── failed ──────┤
                                  time │                   failed
                                       └──── backoff ◄───────┘   (of no length after the first failure)

    The first failure in a row restarts at once; each further one waits twice as long as the one before. Before every
    member was ready once, a failure gives up instead: it is a mistake of the set-up, not an accident.

    Owned by the supervisor's loop; all methods are plain and none blocks. Times are seconds of one monotonic clock.
    """

    def __init__(self, members: list[Member], backoff_s: float, backoff_max_s: float = RESTART_BACKOFF_MAX_S) -> None:
        assert len({member.name for member in members}) == len(members), "names are unique"
        self._states = {member.name: MemberState(member, Phase.BLOCKED) for member in members}
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._was_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether every member serves now."""
        return all(state.phase is Phase.READY for state in self._states.values())

    @property
    def next_wake(self) -> float | None:
        """When `tick` should be called; None: no backoff is running."""
        return min((state.wake_at for state in self._states.values() if state.wake_at is not None), default=None)

    def snapshot(self) -> list[MemberState]:
        """Return every member's state, in the order given."""
        return list(self._states.values())

    def begin(self, now: float) -> list[Action]:
        """Start everything that waits for nobody."""
        return self._launch_unblocked(now)

    def started(self, name: str, life: int, place: Place, now: float) -> list[Action]:
        """Take note that a life serves at `place`. Of an old life: ignored."""
        state = self._states[name]
        if state.life != life or state.phase is not Phase.STARTING:
            return []
        self._states[name] = replace(state, phase=Phase.READY, place=place, since=now)
        self._was_ready = self._was_ready or self.is_ready
        return self._launch_unblocked(now) + self._publish()

    def failed(self, name: str, life: int, reason: str, now: float) -> list[Action]:
        """Take note that a life is over: it did not start, died, or hung and was killed. Of an old life: ignored."""
        state = self._states[name]
        if state.life != life or state.phase not in (Phase.STARTING, Phase.READY):
            return []
        if not self._was_ready:
            return [GiveUp(name, reason)]
        was_published = state.phase is Phase.READY and state.member.role.is_worker
        lasted = state.phase is Phase.READY and now - state.since >= 2 * self._backoff_max_s
        failures = 1 if lasted else state.failures + 1
        state = replace(state, failures=failures, since=now)
        wait = 0.0 if failures == 1 else min(self._backoff_s * 2.0 ** (failures - 2), self._backoff_max_s)
        self._states[name] = replace(state, phase=Phase.BACKOFF, wake_at=now + wait)
        withdrawn = self._publish() if was_published else []
        return withdrawn + self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Restart those whose backoff is over."""
        return [
            self._launch(state, now) for state in self.snapshot() if state.wake_at is not None and state.wake_at <= now
        ]

    def _launch_unblocked(self, now: float) -> list[Action]:
        return [
            self._launch(state, now)
            for state in self.snapshot()
            if state.phase is Phase.BLOCKED
            and (state.member.role is not Role.GATEWAY or self._router_address() is not None)
        ]

    def _launch(self, state: MemberState, now: float) -> Launch:
        state = replace(state, phase=Phase.STARTING, life=state.life + 1, since=now, wake_at=None)
        self._states[state.member.name] = state
        # Workers get a new port each time: nobody must take the new process for the old one. Router and gateway keep
        # theirs, since their clients find them by it.
        keeps_address = not state.member.role.is_worker and state.place is not None
        if not keeps_address or state.place is None:
            return Launch(state.member, state.life, None, self._router_address())
        return Launch(state.member, state.life, state.place.address, self._router_address(), state.place.extra)

    def _router_address(self) -> str | None:
        for state in self._states.values():
            if state.member.role is Role.ROUTER and state.place is not None:
                return state.place.address
        return None

    def _publish(self) -> list[Action]:
        router = next((s for s in self._states.values() if s.member.role is Role.ROUTER), None)
        if router is None or router.phase is not Phase.READY or router.place is None:
            return []  # it is told everything when it is back
        workers = tuple(
            (state.member, state.place)
            for state in self._states.values()
            if state.member.role.is_worker and state.phase is Phase.READY and state.place is not None
        )
        present = {member.name for member, _ in workers}
        absent = tuple(
            state.member
            for state in self._states.values()
            if state.member.role.is_worker and state.member.name not in present
        )
        return [Publish(router.place.address, workers, absent)]
