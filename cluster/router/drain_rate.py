"""How fast the cluster takes up what waits for it."""

_MEMORY_S = 10.0
_COUNT_MIN = 4
"""Fewer observations say nothing."""


class DrainRate:
    """Tokens taken per second while somebody waits: what the cluster drains. The last ten seconds or so count."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._count = 0
        self._last_s: float | None = None

    def took(self, tokens: int, now_s: float, is_busy: bool) -> None:
        """Note that so much was taken out.

        Args:
            tokens: its cost.
            now_s: when.
            is_busy: others wait still; the pause after this measures the cluster, not the arrivals.
        """
        if self._last_s is not None:
            passed = now_s - self._last_s
            keep = _MEMORY_S / (_MEMORY_S + passed)
            self._tokens = self._tokens * keep + tokens
            self._seconds = self._seconds * keep + passed
            self._count += 1
        self._last_s = now_s if is_busy else None

    def seconds_for(self, tokens: float) -> float | None:
        """Return how long it takes to drain so many tokens; None before enough was seen."""
        if self._count < _COUNT_MIN or self._seconds <= 0:
            return None
        return tokens * self._seconds / self._tokens
