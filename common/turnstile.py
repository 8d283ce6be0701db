"""How many of one holder may do something at once; the others wait in the order in which they came."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turnstile:
    """Owned by one loop. What waits is bounded by the calls and connections that may be open."""

    def __init__(self, most: int) -> None:
        """Begin empty.

        Args:
            most: of one holder inside at once.
        """
        self.most = most
        self._inside: dict[str, int] = {}
        """By holder; those that have somebody inside."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, holder: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it."""
        await self.enter(holder)
        try:
            yield
        finally:
            self.leave(holder)

    async def enter(self, holder: str) -> None:
        """Wait for a turn; `leave` ends it."""
        if self.take(holder):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(holder)  # its turn came as it was given up
            raise

    def take(self, holder: str) -> bool:
        """Have a turn now, if there is one; `leave` ends it."""
        inside = self._inside.get(holder, 0)
        if inside >= self.most:
            return False
        self._inside[holder] = inside + 1
        return True

    def leave(self, holder: str) -> None:
        """End a turn; the next one that waits has it."""
        waiting = self._waiting.get(holder)
        while waiting:
            turn = waiting.popleft()
            if not waiting:
                del self._waiting[holder]
            if not turn.done():
                turn.set_result(None)
                return
        self._inside[holder] -= 1
        if not self._inside[holder]:
            del self._inside[holder]
