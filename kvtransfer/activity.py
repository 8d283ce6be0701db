"""Knowing when nothing touches some blocks any more."""

import asyncio
import ctypes
from collections.abc import Callable


class Activity:
    """Counts the threads and requests that read or write the blocks of one transfer. Owned by the loop."""

    def __init__(self) -> None:
        self._count = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way."""
        return self._count == 0

    def begin(self) -> None:
        """One more touches the blocks."""
        self._count += 1
        self._quiet.clear()

    def end(self) -> None:
        """One has let go of them."""
        assert self._count > 0
        self._count -= 1
        if self._count == 0:
            self._quiet.set()

    async def quiet(self, timeout_s: float) -> bool:
        """Wait until nothing is under way, at most so long; return whether that is so."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True


class Stop:
    """Asks a copying thread to stop between two steps. The loop writes, threads and C code read one byte: no lock."""

    __slots__ = ("_flag", "_watchers")

    def __init__(self) -> None:
        self._flag = ctypes.c_uint8(0)
        self._watchers: list[Callable[[], object]] = []

    @property
    def is_set(self) -> bool:
        """Whether to stop."""
        return self._flag.value != 0

    @property
    def address(self) -> int:
        """Where C code finds the byte; this object must outlive the call."""
        return ctypes.addressof(self._flag)

    def set(self) -> None:
        """Ask; there is no way back. On the loop."""
        self._flag.value = 1
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()

    def watch(self, watcher: Callable[[], object]) -> None:
        """Have something called when the stop is asked for."""
        self._watchers.append(watcher)
