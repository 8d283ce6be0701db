"""Drives one workload against one target: sends each session in its time and gathers the records."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from common.errors import BatonError, ConfigError
from loadtest.arrivals import Arrival, ClosedArrival, PacedArrival, TraceArrival
from loadtest.client import ClientRequest, StreamLog, Target
from loadtest.content import continued
from loadtest.records import RequestRecord, Slo
from loadtest.workload import Session


class Observer(Protocol):
    """Sees a run as it goes, e.g. to show it."""

    def on_sent(self) -> None:
        """Note that a request was sent."""
        ...

    def on_record(self, record: RequestRecord) -> None:
        """Note that a request has ended; the record's times count from the start of the run."""
        ...


class Unobserved:
    """Nobody looks."""

    def on_sent(self) -> None:
        """Ignore it."""

    def on_record(self, record: RequestRecord) -> None:
        """Ignore it."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is driven."""

    seed: int = 0
    duration_s: float | None = None
    """No session starts later than this; what is under way is waited for."""
    timeout_s: float = 300.0
    """Deadline of each request."""
    ignore_eos: bool = True
    """Generate exactly as many tokens as asked."""
    targets: Slo | None = None
    """What each request asks of the service: one that would miss it is refused at once. None: nothing."""
    inflight_max: int = 20_000
    """Most sessions at once. Beyond it arrivals wait in the client, and the wait counts as latency."""


class LoadRun:
    """One run. Owned by the event loop that awaits `run`; `records` may be read after an interruption, too."""

    def __init__(self, target: Target, options: RunOptions, observer: Observer | None = None) -> None:
        self.records: list[RequestRecord] = []
        self.num_sent = 0
        self._target = target
        self._options = options
        self._observer = observer or Unobserved()
        self._start = 0.0

    async def run(self, sessions: Iterator[Session], arrival: Arrival) -> list[RequestRecord]:
        """Send all sessions and wait for their ends.

        Args:
            sessions: what to ask. An endless iterator needs `duration_s`.
            arrival: when to ask.

        Returns:
            One record for each request, in order of their ends. A failed request is a record, too; it ends its session.

        Raises:
            ConfigError: trace times were asked for and the workload has none.
        """
        self._start = time.monotonic()
        match arrival:
            case ClosedArrival():
                await self._run_closed(sessions, arrival)
            case _:
                await self._run_open(timed(sessions, arrival, self._options.seed))
        return self.records

    async def _run_open(self, timed: Iterator[tuple[float, Session]]) -> None:
        room = asyncio.Semaphore(self._options.inflight_max)
        failure: BatonError | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                for at, session in timed:
                    if self._is_over(at):
                        break
                    if (wait := self._start + at - time.monotonic()) > 0:
                        await asyncio.sleep(wait)
                    await room.acquire()
                    task = tasks.create_task(self._converse(session, self._start + at))
                    task.add_done_callback(lambda _: room.release())
            except BatonError as error:
                # A workload that cannot go on: what is under way ends first, and no group wraps the error.
                failure = error
        if failure is not None:
            raise failure

    async def _run_closed(self, sessions: Iterator[Session], arrival: ClosedArrival) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(arrival.users):
                tasks.create_task(self._one_user(sessions, arrival.think_s))

    async def _one_user(self, sessions: Iterator[Session], think_s: float) -> None:
        # All users draw from one iterator; they share the loop, so nothing interleaves inside next().
        for session in sessions:
            if self._is_over(time.monotonic() - self._start):
                return
            await self._converse(session, time.monotonic())
            if think_s:
                await asyncio.sleep(think_s)

    def _is_over(self, at: float) -> bool:
        return self._options.duration_s is not None and at > self._options.duration_s

    async def _converse(self, session: Session, intended: float) -> None:
        """Ask turn after turn; `intended` is when the first should have been sent, on the monotonic clock."""
        prompt = session.turns[0].prompt
        for number, turn in enumerate(session.turns):
            request = ClientRequest(
                request_id=f"load-{self._options.seed}-{session.number}-{number}",
                prompt=prompt,
                output_tokens=turn.output_tokens,
                ignore_eos=self._options.ignore_eos,
                timeout_s=self._options.timeout_s,
                seed=self._options.seed + session.number,
                targets=self._options.targets,
            )
            log = await self._ask(request, session.number, number, intended)
            if log is None or number + 1 == len(session.turns):
                return
            following = session.turns[number + 1]
            intended = time.monotonic() + following.think_s
            if following.think_s:
                await asyncio.sleep(following.think_s)
            prompt = continued(prompt, log.token_ids, "".join(log.text), following.prompt)

    async def _ask(self, request: ClientRequest, session: int, turn: int, intended: float) -> StreamLog | None:
        """Send one request and keep its record; None when it failed."""
        log, error = StreamLog(), None
        sent = time.monotonic()
        self.num_sent += 1
        self._observer.on_sent()
        try:
            await self._target.generate(request, log)
        except BatonError as failure:
            error = failure
        record = log.record(request, session, turn, intended, sent, error, self._start)
        self.records.append(record)
        self._observer.on_record(record)
        return log if error is None else None


def timed(
    sessions: Iterator[Session], arrival: PacedArrival | TraceArrival, seed: int
) -> Iterator[tuple[float, Session]]:
    """Yield each session with its arrival time in seconds from the start of the run.

    Raises:
        ConfigError: trace times were asked for and the workload has none.
    """
    if not isinstance(arrival, TraceArrival):
        # The arrivals' draws are apart from the workload's, so that a rate can change and the content not.
        yield from zip(arrival.times(Random(f"arrival/{seed}")), sessions, strict=False)
        return
    first: float | None = None
    for session in sessions:
        if session.at_s is None:
            raise ConfigError("arrival `trace` needs a workload with timestamps")
        first = session.at_s if first is None else first
        yield (session.at_s - first) / arrival.speedup, session
