"""Which layers of which landing blocks have been written: each exactly once, or the transfer is wrong."""

from common.errors import TransferError


class Coverage:
    """A bit for each (landing block, layer) of one ticket. Owned by the landing."""

    def __init__(self, num_blocks: int, layers: range) -> None:
        self._layers = layers
        self._full = self._mask(layers)
        self._written = [0] * num_blocks
        self._missing = num_blocks if self._full else 0

    @property
    def num_missing(self) -> int:
        """Landing blocks that lack at least one layer."""
        return self._missing

    def add(self, first: int, count: int, layers: range) -> None:
        """Note that landing blocks `[first, first + count)` get `layers`.

        Raises:
            TransferError: outside the ticket, or written before; nothing was noted.
        """
        self.check(first, count, layers)
        mask = self._mask(layers)
        if any(self._written[block] & mask for block in range(first, first + count)):
            raise TransferError(f"landing blocks {first}+{count} were sent twice")
        for block in range(first, first + count):
            self._written[block] |= mask
            self._missing -= self._written[block] == self._full

    def check(self, first: int, count: int, layers: range) -> None:
        """Check a range.

        Raises:
            TransferError: empty, or outside the ticket.
        """
        if count < 1 or first + count > len(self._written):
            raise TransferError(f"a piece for landing blocks {first}+{count} of {len(self._written)}")
        if not self._layers.start <= layers.start < layers.stop <= self._layers.stop:
            raise TransferError(
                f"a piece for layers {layers.start}..{layers.stop} of {self._layers.start}..{self._layers.stop}"
            )

    @staticmethod
    def _mask(layers: range) -> int:
        return ((1 << len(layers)) - 1) << layers.start
