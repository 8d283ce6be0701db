"""A limit to many waits, for the price of one timer now and then instead of one for each wait."""

import asyncio
from collections.abc import Callable

OnLate = Callable[[], None]


class Waits:
    """Calls whoever's wait has lasted longer than it may. Owned by one loop; plain functions."""

    def __init__(self, limit_s: float) -> None:
        """Nobody waits yet."""
        self.limit_s = limit_s
        """Longest wait."""
        self._due_s: dict[OnLate, float] = {}
        """The oldest wait is first: all have the same limit."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, on_late: OnLate) -> None:
        """Begin a wait.

        Args:
            on_late: called if the wait is longer than the limit, once; it names the wait. One that runs begins anew.
        """
        loop = asyncio.get_running_loop()
        self._due_s.pop(on_late, None)
        self._due_s[on_late] = due_s = loop.time() + self.limit_s
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._look)

    def end(self, on_late: OnLate) -> None:
        """End a wait, if it runs."""
        self._due_s.pop(on_late, None)

    def _look(self) -> None:
        """Call those that are late. The timer is not moved when a wait ends: it may come for nobody."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._due_s:
            on_late, due_s = next(iter(self._due_s.items()))
            if due_s > now_s:
                break
            del self._due_s[on_late]
            on_late()
        if self._timer is None and self._due_s:
            self._timer = loop.call_at(next(iter(self._due_s.values())), self._look)
