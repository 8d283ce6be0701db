"""A thread at which tenants take turns: however much work one brings, another one's waits for one piece of it."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from cluster.tenants.callers import CALLER

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class FairThread:
    """Owned by the gateway's loop. What waits is bounded by the requests that may run."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[str, deque[_Job]] = {}
        """By tenant; the first one's turn is next."""
        self._is_busy = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread when it is the caller's turn. What is cancelled before that does not run."""
        caller = CALLER.get(None)
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault("" if caller is None else caller.tenant, deque()).append(job)
        self._next()
        result: T = await job.result
        return result

    def close(self) -> None:
        """Give the thread back; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        while self._waiting and not self._is_busy:
            tenant = next(iter(self._waiting))
            jobs = self._waiting.pop(tenant)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs  # behind all others
            if not job.result.done():
                self._is_busy = True
                running = asyncio.get_running_loop().run_in_executor(self._thread, job.work)
                running.add_done_callback(partial(self._done, job))

    def _done(self, job: _Job, done: asyncio.Future[Any]) -> None:
        self._is_busy = False
        if not job.result.done():
            if done.cancelled():
                job.result.cancel()
            elif (error := done.exception()) is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())
        elif not done.cancelled():
            done.exception()  # nobody waits for it any more
        self._next()
