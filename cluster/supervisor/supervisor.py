"""Keeps a cluster's processes alive: carries out what the fleet decides, and reports to it what happens.

It runs inside `baton serve`, not in an actor of its own: actors live as long as their owner, so an owner in another
process would only move the question of who restarts it; Ctrl-C stops everything in order; and a process less runs.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

from cluster.supervisor.fleet import Action, Fleet, GiveUp, Launch, Member, MemberState, Phase, Place, Publish, Role
from cluster.supervisor.interface import Launcher, Process
from cluster.supervisor.probe import Prober
from cluster.supervisor.publisher import Publisher
from common.clock import Clock
from common.config import SupervisorConfig
from common.errors import BatonError
from common.logs import log

_LOG = logging.getLogger(__name__)
_WITHDRAW_TIMEOUT_S = 2.0
# The order of an orderly end: no new requests, then those who work on them, then who places them.
_STOP_ORDER = ((Role.GATEWAY,), (Role.DECODE, Role.BOTH), (Role.PREFILL,), (Role.ROUTER,))


class _Started(NamedTuple):
    name: str
    life: int
    place: Place


class _Failed(NamedTuple):
    name: str
    life: int
    error: BatonError


class _Stop(NamedTuple):
    drain_timeout_s: float


class Supervisor:
    """Owns the fleet, its processes and the router's worker list. Everything happens on one asyncio loop."""

    def __init__(
        self,
        members: Sequence[Member],
        launcher: Launcher,
        prober: Prober,
        config: SupervisorConfig,
        clock: Clock,
        on_change: Callable[[list[MemberState]], None] = lambda _: None,
    ) -> None:
        self._fleet = Fleet(list(members), config.restart_backoff_s)
        self._launcher = launcher
        self._prober = prober
        self._config = config
        self._clock = clock
        self._on_change = on_change
        self._publisher = Publisher()
        # One life posts two events, so the inbox is bounded by the number of members.
        self._inbox: asyncio.Queue[_Started | _Failed | _Stop] = asyncio.Queue()
        self._processes: dict[str, Process] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._error: BatonError | None = None

    def snapshot(self) -> list[MemberState]:
        """Return the state of every member."""
        return self._fleet.snapshot()

    async def wait_ready(self) -> None:
        """Wait until every member serves and the router knows all workers. Fails when run() fails."""
        await self._ready.wait()
        await self._publisher.confirmed()

    def stop(self, drain_timeout_s: float) -> None:
        """Begin the orderly end; run() returns when all is stopped. A second call ends the drain, a third one all."""
        self._inbox.put_nowait(_Stop(drain_timeout_s))

    async def run(self) -> None:
        """Start the fleet and keep it alive until stop().

        Raises:
            BatonError: a member did not come up at the first start; everything is stopped then.
        """
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publisher.run())
            self._carry_out(tasks, self._fleet.begin(self._clock.now()))
            try:
                while self._error is None:
                    event = await self._next_event()
                    if isinstance(event, _Stop):
                        await self._stop_all(tasks, event.drain_timeout_s)
                        break
                    self._carry_out(tasks, self._handle(event))
                    self._on_change(self.snapshot())
            finally:
                for task in [publishing, *self._lives]:
                    task.cancel()
        if self._error is not None:
            raise self._error

    async def _next_event(self) -> _Started | _Failed | _Stop | None:
        wake = self._fleet.next_wake
        try:
            async with asyncio.timeout(None if wake is None else max(0.0, wake - self._clock.now())):
                return await self._inbox.get()
        except TimeoutError:
            return None

    def _handle(self, event: _Started | _Failed | None) -> list[Action]:
        now = self._clock.now()
        match event:
            case None:
                return self._fleet.tick(now)
            case _Started(name, life, place):
                log(
                    _LOG,
                    logging.INFO if life > 1 else logging.DEBUG,
                    "serving",
                    name=name,
                    life=life,
                    address=place.address,
                    pid=place.pid,
                )
                actions = self._fleet.started(name, life, place, now)
            case _Failed(name, life, error):
                log(_LOG, logging.WARNING, f"lost: {error.message}", name=name, life=life)
                actions = self._fleet.failed(name, life, error.message, now)
                if any(isinstance(action, GiveUp) for action in actions):
                    self._error = error
        return actions

    def _carry_out(self, tasks: asyncio.TaskGroup, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    life = tasks.create_task(self._live(action))
                    self._lives.add(life)
                    life.add_done_callback(self._lives.discard)
                case Publish():
                    self._publisher.publish(action)
                case GiveUp():
                    assert self._error is not None
        if self._fleet.is_ready:
            self._ready.set()

    async def _live(self, launch: Launch) -> None:
        """Lead one process from its creation to its end, and report both. It is dead when this returns."""
        name, life = launch.member.name, launch.life
        process: Process | None = None
        try:
            process = await self._launcher.launch(launch)
            self._processes[name] = process
            async with asyncio.timeout(self._config.start_timeout_s):
                place = await process.started()
            self._inbox.put_nowait(_Started(name, life, place))
            error = BatonError(await _first(process.failed(), self._prober.hung(place.probe_address)))
        except TimeoutError:
            error = BatonError(f"{name} did not start within {self._config.start_timeout_s:g} s")
        except BatonError as raised:
            error = raised
        finally:
            if process is not None:
                process.kill()
        self._inbox.put_nowait(_Failed(name, life, error))

    async def _stop_all(self, tasks: asyncio.TaskGroup, drain_timeout_s: float) -> None:
        """Stop role by role. Events of the lives that end meanwhile stay unread."""
        for patience_s in (drain_timeout_s, 0.0):
            stopping = tasks.create_task(self._stop_in_order(patience_s))
            hurry = tasks.create_task(self._wait_for_stop())
            await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if stopping.done():
                return
            stopping.cancel()
            await asyncio.wait([stopping])

    async def _wait_for_stop(self) -> None:
        while not isinstance(await self._inbox.get(), _Stop):
            continue

    async def _stop_in_order(self, drain_timeout_s: float) -> None:
        states = {state.member.name: state for state in self.snapshot()}
        for roles in _STOP_ORDER:
            if Role.DECODE in roles:
                await self._withdraw_workers(states)
            names = [n for n, s in states.items() if s.member.role in roles and s.phase is Phase.READY]
            outcomes = await asyncio.gather(
                *(self._processes[name].stop(drain_timeout_s) for name in names), return_exceptions=True
            )
            for name, outcome in zip(names, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    log(_LOG, logging.WARNING, f"did not stop in order: {outcome!r}", name=name)

    async def _withdraw_workers(self, states: dict[str, MemberState]) -> None:
        """Tell the router that no worker is left, so that it does not take their end for a loss."""
        router = next((s for s in states.values() if s.member.role is Role.ROUTER), None)
        if router is None or router.phase is not Phase.READY or router.place is None:
            return
        self._publisher.publish(Publish(router.place.address, ()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WITHDRAW_TIMEOUT_S):
                await self._publisher.confirmed()


async def _first(*waits: Coroutine[None, None, str]) -> str:
    """Return what the first of several waits returns, and end the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
