"""Counting Ctrl-C: several signals may be one press of it."""

import math

_ECHO_S = 1.0
"""`timeout`, `make` and a terminal signal a process and then its group; later than this it is somebody's wish."""


class Presses:
    """The signals of one process's life. Signals soon after one that counted are its echoes, however many come."""

    def __init__(self) -> None:
        self._count = 0
        self._counted_s = -math.inf

    def signal(self, now_s: float) -> int:
        """Return which press, counted from 1, a signal at this time is; 0 for an echo."""
        if now_s - self._counted_s < _ECHO_S:
            return 0
        self._counted_s = now_s
        self._count += 1
        return self._count
