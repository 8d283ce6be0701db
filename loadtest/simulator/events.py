"""A virtual clock and what is due on it."""

import heapq
from collections.abc import Callable

from common.clock import ManualClock


class Timeline:
    """Runs callbacks in order of their times; equal times in the order in which they were asked for.

    So a simulation is the same each time it is run. Owned by one simulation.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def now(self) -> float:
        """Return the virtual time, seconds."""
        return self.clock.now()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Run `call` at `when`, or now if that is past."""
        self._number += 1
        heapq.heappush(self._due, (max(when, self.now()), self._number, call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Run `call` so many seconds from now."""
        self.at(self.now() + delay, call)

    def run(self) -> None:
        """Run until nothing is due."""
        while self._due:
            when, _, call = heapq.heappop(self._due)
            self.clock.advance(when - self.clock.now())
            call()
