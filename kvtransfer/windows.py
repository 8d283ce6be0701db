"""Credits: how many bytes each sender may have under way, so that what a receiver keeps for them has a bound."""

from common.errors import ConfigError, OverloadedError
from kvtransfer.pieces import PIECE_BYTES_MAX

SHARE = 16
"""A sender gets this part of what is left: early ones get much, and there is room for more than anybody connects."""


class Windows:
    """The memory that a receiver has for pieces under way, shared among its senders. Owned by the endpoint's loop.

    A window belongs to a connection from its Hello to its end. Whoever uses up his own waits for his own
    acknowledgements: a slow or dead peer holds up nobody else.

    Args:
        total: bytes for all.
        window_max: most for one.
        block_bytes: of the pool; a window has room for the largest piece at least.
    """

    def __init__(self, total: int, window_max: int, block_bytes: int) -> None:
        self._left = total
        self._window_max = window_max
        self._window_min = min(window_max, max(PIECE_BYTES_MAX, block_bytes))
        if total < self._window_min:
            raise ConfigError(f"transfer.staging_bytes_max={total} is less than one window of {self._window_min}")

    def grant(self) -> int:
        """Return the bytes of a new connection's window.

        Raises:
            OverloadedError: nothing is left.
        """
        if self._left < self._window_min:
            raise OverloadedError("no memory is left for another sender's pieces (transfer.staging_bytes_max)")
        window = min(self._window_max, max(self._window_min, self._left // SHARE))
        self._left -= window
        return window

    def give_back(self, window: int) -> None:
        """Take back a window that was granted."""
        self._left += window
