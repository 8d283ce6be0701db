"""Walking through scattered memory with a socket."""

from kvtransfer.memory import Memory
from kvtransfer.pieces import IntArray

IOV_MAX = 1024
STEP_BYTES = 1024 * 1024
"""Moved in one call, before other callbacks of the loop have their turn."""


class Cursor:
    """What is left of a list of buffers that a socket fills or empties from the beginning."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self._buffers = buffers
        self._at = 0
        self.num_bytes = sum(map(len, buffers))

    @classmethod
    def over(cls, memory: Memory, offsets: IntArray, sizes: IntArray) -> "Cursor":
        """Return a cursor over ranges of a pool."""
        view = memory.view
        return cls([view[at : at + size] for at, size in zip(offsets.tolist(), sizes.tolist(), strict=True)])

    @classmethod
    def of_nothing(cls, num_bytes: int) -> "Cursor":
        """Return a cursor that only counts."""
        cursor = cls([])
        cursor.num_bytes = num_bytes
        return cursor

    def window(self) -> list[memoryview]:
        """Return the next buffers, about `STEP_BYTES` of them."""
        end, total = self._at, 0
        while end < len(self._buffers) and total < STEP_BYTES and end - self._at < IOV_MAX:
            total += len(self._buffers[end])
            end += 1
        window = self._buffers[self._at : end]
        if total > STEP_BYTES:
            window[-1] = window[-1][: len(window[-1]) - (total - STEP_BYTES)]
        return window

    def advance(self, num_bytes: int) -> None:
        """Note that so many bytes are through."""
        self.num_bytes -= num_bytes
        while self._at < len(self._buffers) and num_bytes >= len(self._buffers[self._at]):
            num_bytes -= len(self._buffers[self._at])
            self._at += 1
        if num_bytes and self._at < len(self._buffers):
            self._buffers[self._at] = self._buffers[self._at][num_bytes:]
