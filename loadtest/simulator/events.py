"""A virtual clock and what is due on it."""

import heapq
from collections.abc import Callable


class Timeline:
    """Runs callbacks in order of their times; equal times in the order in which they were asked for.

    So a simulation is the same each time it is run. It is a Clock. Owned by one simulation.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def now(self) -> float:
        """Return the virtual time, seconds."""
        return self._now

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Run `call` at `when`, or now if that is past."""
        self._number += 1
        heapq.heappush(self._due, (when if when > self._now else self._now, self._number, call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        """Run `call` so many seconds from now."""
        self.at(self._now + delay, call)

    def run(self) -> None:
        """Run until nothing is due."""
        while self._due:
            self._now, _, call = heapq.heappop(self._due)
            call()
