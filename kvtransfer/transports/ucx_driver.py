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
        self._pending: list[tuple[Any, asyncio.Future[None], object]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_scheduled = False
        self._is_closed = False
        self._fd: int = self.worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._progress)
        self.kick()

    def watch(self, request: Any, buffer: memoryview | bytearray | bytes) -> asyncio.Future[None]:
        """Return a future of a ucxx request on `buffer`, which is kept alive; an exception is a `TransferError`.

        Cancelling it would not stop UCX from using the buffer: nobody may.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        self._pending.append((request, done, buffer))
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
        if self._tasks:
            await asyncio.wait(list(self._tasks))
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
        completed = [entry for entry in self._pending if entry[0].completed]
        if not completed:
            return False
        self._pending = [entry for entry in self._pending if not entry[0].completed]
        for request, done, _ in completed:
            try:
                request.check_error()
            except ucx.UCXError as error:
                done.set_exception(TransferError(f"ucx: {error}"))
            else:
                done.set_result(None)
        return True
