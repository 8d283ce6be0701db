"""Progress for a UCX worker from an asyncio loop: woken by events, idle at no cost, never polling.

ucxx's own awaitables yield in a loop while a request is pending, which takes up to a core from whoever computes in
this process. Here the loop watches the worker's event descriptor, makes progress when it fires, and arms it again.
The settings are those measured on this project's test machine: segments of 512 KiB triple the rate over TCP, and
keep-alives of a second notice an unplugged peer. Remote memory access is left out of the features: with it, whoever
reaches the port can read and write this process.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import ucxx._lib.libucxx as ucx

from common.errors import TransferError
from common.hosts import is_loopback

T = TypeVar("T")

OPTIONS = {
    "TCP_TX_SEG_SIZE": "512K",
    "TCP_RX_SEG_SIZE": "512K",
    "TCP_KEEPIDLE": "1s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
}
FEATURES = (ucx.Feature.TAG, ucx.Feature.WAKEUP, ucx.Feature.STREAM)
BUDGET_S = 0.002
"""Progress made in one go before other callbacks of the loop have their turn."""


class _Watched:
    """Requests that matter only together.

    Args:
        requests: those that have not completed, and maybe some that have.
        buffers: kept alive.
        done: resolved when all have.
        failure: what it will be resolved with, if anything.
    """

    __slots__ = ("_buffers", "_done", "_failure", "_requests")

    def __init__(
        self, requests: list[Any], buffers: object, done: asyncio.Future[None], failure: TransferError | None
    ) -> None:
        self._requests = requests
        self._buffers = buffers
        self._done = done
        self._failure = failure

    def settle(self) -> bool:
        """Resolve the future if all have completed; return whether that is so."""
        while self._requests and self._requests[-1].completed:
            try:
                self._requests.pop().check_error()
            except ucx.UCXError as error:
                self._failure = self._failure or TransferError(f"ucx: {error}")
        if self._requests:
            return False
        if self._failure is not None:
            self._done.set_exception(self._failure)
        else:
            self._done.set_result(None)
        return True


class UcxDriver:
    """One UCX context and worker, and the requests under way on it. Owned by the loop on which it was made."""

    def __init__(self, host: str) -> None:
        options = dict(OPTIONS)
        if is_loopback(host):
            options["NET_DEVICES"] = "lo"  # UCX listens on every device it may use, and asks nobody for a password
        self._context: Any = ucx.UCXContext(options, feature_flags=FEATURES)
        self.worker: Any = ucx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self.worker.init_blocking_progress_mode()
        self._loop = asyncio.get_running_loop()
        self._pending: dict[asyncio.Future[None], _Watched] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_scheduled = False
        self._is_closed = False
        self._fd: int = self.worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._progress)
        self.kick()

    def watch(self, requests: list[Any], buffers: object, failure: TransferError | None = None) -> asyncio.Future[None]:
        """Return a future of ucxx requests, done when UCX uses none of their buffers any more.

        Cancelling it would not stop UCX from using them: nobody may.

        Args:
            requests: owned by the driver from now on.
            buffers: kept alive.
            failure: why some were not even made; the future ends in it, or in the first other error.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        done.add_done_callback(lambda done: done.exception())  # it may end while nobody waits
        self._pending[done] = _Watched(requests, buffers, done, failure)
        self.kick()
        return done

    def kick(self) -> None:
        """Make progress soon; needed after every call into UCX."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._scheduled)

    def close_endpoint(self, endpoint: Any) -> None:
        """Break an endpoint off at once; its requests complete with an error. Not from a callback of UCX."""
        endpoint.remove_close_callback()
        # `close` without `_blocking` crashes on an endpoint that has failed. This one forces and takes microseconds.
        endpoint.close_blocking()
        self.worker.cancel_inflight_requests()  # receives that no message had matched
        self.kick()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run what follows a request to its end; `close` waits for it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait until UCX uses no buffer of ours, and let go of the worker. Every endpoint is closed before."""
        if ending := [*self._tasks, *self._pending]:
            await asyncio.wait(ending)
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self.worker.progress()
            self._settle()
            self.worker = self._context = None  # their descriptors close now, not when cycles are collected

    def _scheduled(self) -> None:
        self._is_scheduled = False
        if not self._is_closed:
            self._progress()

    def _progress(self) -> None:
        """Progress until nothing happens, then arm the event; or come back soon."""
        worker = self.worker
        until = self._loop.time() + BUDGET_S
        while True:
            while worker.progress_once():
                if self._loop.time() > until:
                    self._settle()
                    self.kick()
                    return
            if self._settle():
                self.kick()  # whoever waited will probably submit more: arm after that
                return
            if worker.arm():
                return

    def _settle(self) -> bool:
        """Resolve what has completed; return whether anything had."""
        over = [done for done, watched in self._pending.items() if watched.settle()]
        for done in over:
            del self._pending[done]
        return bool(over)
