"""Time as a dependency: code that decides by time takes a `Clock`, tests pass a `ManualClock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never goes back."""

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds since boot, or so."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until told otherwise. For tests and the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the time last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward."""
        assert seconds >= 0
        self._now += seconds
