"""A limit to many waits, one after the other, for the price of a timer now and then instead of one for each wait."""

import asyncio
from collections.abc import Callable


class Patience:
    """Calls `on_late` when a wait has lasted longer than it may. Owned by the task that waits.

    The timer is not moved when a wait ends: when it fires it looks whether there is one, and how old it is.
    """

    def __init__(self, limit_s: float, on_late: Callable[[], None]) -> None:
        """Nothing is waited for yet.

        Args:
            limit_s: longest wait.
            on_late: called once for a wait that is longer.
        """
        self._limit_s = limit_s
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to wait."""
        self._since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._look)

    def end(self) -> None:
        """End the wait."""
        self._since_s = None

    def close(self) -> None:
        """Give the timer back. Idempotent."""
        self._since_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._since_s is None:
            return
        due_s = self._since_s + self._limit_s
        if due_s > self._loop.time():
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self._since_s = None
            self._on_late()
