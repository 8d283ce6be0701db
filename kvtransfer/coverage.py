"""Which layers of which landing blocks have been written: each exactly once, or the transfer is wrong."""

import numpy as np

from common.errors import TransferError


class Coverage:
    """A flag for each (landing block, layer) of one ticket. Owned by the landing."""

    def __init__(self, num_blocks: int, layers: range) -> None:
        self._layers = layers
        self._num_blocks = num_blocks
        self._written = np.zeros((num_blocks, len(layers)), dtype=np.bool_)

    @property
    def num_missing(self) -> int:
        """Landing blocks that lack at least one layer."""
        return self._num_blocks - int(self._written.all(axis=1).sum())

    def add(self, first: int, count: int, layers: range) -> None:
        """Note that landing blocks `[first, first + count)` get `layers`.

        Raises:
            TransferError: outside the ticket, or written before; nothing was noted.
        """
        self.check(first, count, layers)
        begin = self._layers.start
        written = self._written[first : first + count, layers.start - begin : layers.stop - begin]
        if written.any():
            raise TransferError(f"landing blocks {first}+{count} were sent twice")
        written[:] = True

    def check(self, first: int, count: int, layers: range) -> None:
        """Check a range.

        Raises:
            TransferError: empty, or outside the ticket.
        """
        if count < 1 or first + count > self._num_blocks:
            raise TransferError(f"a piece for landing blocks {first}+{count} of {self._num_blocks}")
        if not self._layers.start <= layers.start < layers.stop <= self._layers.stop:
            raise TransferError(
                f"a piece for layers {layers.start}..{layers.stop} of {self._layers.start}..{self._layers.stop}"
            )
