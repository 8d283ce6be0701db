"""Knowing when nothing touches some blocks any more."""

import asyncio


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
    """Asks a copying thread to stop between two steps. The loop writes, the thread reads: one bool needs no lock."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False
