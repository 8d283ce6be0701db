"""A thread at which callers take turns: however much work one brings, another one's waits for one piece of it."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    holds_loop_up: bool


class FairThread:
    """Owned by one loop. What waits is bounded by the calls that may run.

    idle ──run──► busy ──done──► idle, or busy with the next one
                    └──done, held the loop up──► resting ──as long again──► idle, or busy
    """

    def __init__(self, name: str, whose: Callable[[], str] = lambda: "") -> None:
        """Begin without work.

        Args:
            name: of the thread.
            whose: called in the context of whoever brings work: who that is, of those that take turns.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._whose = whose
        self._waiting: dict[str, deque[_Job]] = {}
        """By whose it is; the first one's turn is next."""
        self._is_busy = False

    async def run(self, work: Callable[[], T], holds_loop_up: bool = False) -> T:
        """Run `work` on the thread when it is the caller's turn. What is cancelled before that does not run.

        Args:
            work: what to do.
            holds_loop_up: it keeps the interpreter to itself (parsers do): afterwards the thread rests for as long as
                it took. Without that the loop gets one step between two such pieces, and needs dozens for a token.
        """
        job = _Job(work, asyncio.get_running_loop().create_future(), holds_loop_up)
        self._waiting.setdefault(self._whose(), deque()).append(job)
        self._next()
        result: T = await job.result
        return result

    def close(self) -> None:
        """Give the thread back; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        while self._waiting and not self._is_busy:
            whose = next(iter(self._waiting))
            jobs = self._waiting.pop(whose)
            job = jobs.popleft()
            if jobs:
                self._waiting[whose] = jobs  # behind all others
            if not job.result.done():
                self._is_busy = True
                loop = asyncio.get_running_loop()
                running = loop.run_in_executor(self._thread, job.work)
                running.add_done_callback(partial(self._done, job, loop.time()))

    def _done(self, job: _Job, began_s: float, done: asyncio.Future[Any]) -> None:
        if not job.result.done():
            if done.cancelled():
                job.result.cancel()
            elif (error := done.exception()) is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())
        elif not done.cancelled():
            done.exception()  # nobody waits for it any more
        if job.holds_loop_up:
            loop = asyncio.get_running_loop()
            loop.call_later(loop.time() - began_s, self._rested)
        else:
            self._rested()

    def _rested(self) -> None:
        self._is_busy = False
        self._next()
