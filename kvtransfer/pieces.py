"""From block ids to byte ranges: what one piece of a transfer copies from where to where."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.layout import BlockLayout

IntArray = NDArray[np.int64]

PIECE_BYTES_MAX = 8 * 1024 * 1024
"""Large announcements are cut here, so that the sender hashes one piece while the receiver copies the one before."""
PLAIN_BYTES_MAX = 32 * 1024 * 1024
"""The same where nothing is hashed or sent: a piece costs messages, and this many bytes are copied in 3 ms."""
PIECE_BLOCKS_MAX = 8192
PACK_BELOW_BYTES = 64 * 1024
"""Pieces whose runs are smaller on average are packed: a message costs 15-40 us of Python at each end."""


class Run(NamedTuple):
    """Contiguous in both pools: offsets in bytes from their beginnings."""

    source: int
    target: int
    num_bytes: int


class Runs:
    """Many runs in order, as a table that one call can walk: a piece of small blocks has hundreds.

    Args:
        table: `[num_runs, 3] int64`, contiguous: source offset, target offset, bytes.
    """

    __slots__ = ("num_bytes", "table")

    def __init__(self, table: IntArray) -> None:
        self.table = np.ascontiguousarray(table, dtype=np.int64)
        self.num_bytes = int(self.table[:, 2].sum())

    @classmethod
    def of(cls, runs: Iterable[Run]) -> "Runs":
        """Return runs that are listed one by one."""
        return cls(np.array(list(runs), dtype=np.int64).reshape(-1, 3))

    @property
    def sources(self) -> IntArray:
        """Offsets in the source, `[num_runs]`."""
        return self.table[:, 0]

    @property
    def targets(self) -> IntArray:
        """Offsets in the target, `[num_runs]`."""
        return self.table[:, 1]

    @property
    def sizes(self) -> IntArray:
        """Bytes, `[num_runs]`."""
        return self.table[:, 2]

    def with_sources(self, sources: IntArray) -> "Runs":
        """Return the same targets, filled from elsewhere."""
        return Runs(np.stack([sources, self.targets, self.sizes], axis=1))

    def with_targets(self, targets: IntArray) -> "Runs":
        """Return the same sources, copied to elsewhere."""
        return Runs(np.stack([self.sources, targets, self.sizes], axis=1))

    @property
    def are_packed(self) -> bool:
        """Whether a wire carries them as one message; both ends decide alike."""
        return len(self) > 1 and self.num_bytes < len(self) * PACK_BELOW_BYTES

    def packed(self) -> IntArray:
        """Return where each run begins when they lie one after the other, `[num_runs]`."""
        return np.cumsum(self.sizes) - self.sizes

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Run]:
        return map(Run._make, self.table.tolist())


class Piece(NamedTuple):
    """Some layers of some blocks; the unit of announcement, checksum and acknowledgement."""

    first: int
    block_ids: Sequence[int]
    """Of many: `block_array`."""
    layers: range


def block_array(block_ids: Iterable[int]) -> "array[int]":
    """Return ids side by side in memory: a walk over a long list waits for memory at each of its numbers."""
    return array("q", block_ids)


def are_blocks(block_ids: Sequence[int], num_blocks: int) -> bool:
    """Whether all are ids of a pool of so many blocks."""
    ids = np.asarray(block_ids, dtype=np.int64)
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < num_blocks)


def piece_bytes(piece: Piece, layout: BlockLayout) -> int:
    """Bytes in a piece."""
    return len(piece.block_ids) * len(piece.layers) * layout.layer_bytes


def blocks_together(num_layers: int, layout: BlockLayout, num_bytes_max: int = PIECE_BYTES_MAX) -> int:
    """Return how many blocks of so many layers travel as one piece: those of `num_bytes_max`, or one that is larger."""
    return min(max(num_bytes_max // (num_layers * layout.layer_bytes), 1), PIECE_BLOCKS_MAX)


def part_of(piece: Piece, begin: int, count: int) -> Piece:
    """Return the part of a piece from its block `begin` on. What is left is not copied: there may be hundreds."""
    return Piece(piece.first + begin, piece.block_ids[begin : begin + count], piece.layers)


def joined(piece: Piece, following: Piece) -> Piece | None:
    """Return two pieces as one if they are the same blocks and neighbouring layers, as a forward pass makes them."""
    if (piece.first, piece.layers.stop) != (following.first, following.layers.start):
        return None
    if piece.block_ids != following.block_ids:
        return None
    return piece._replace(layers=range(piece.layers.start, following.layers.stop))


def runs_of(piece: Piece, landing_ids: Sequence[int] | IntArray, layout: BlockLayout) -> Runs:
    """Return what to copy, in the order of the blocks; whole blocks that are neighbours on both sides become one run.

    Args:
        piece: names the source blocks.
        landing_ids: all landing blocks of the ticket.
        layout: of both pools.
    """
    offset = piece.layers.start * layout.layer_bytes
    size = len(piece.layers) * layout.layer_bytes
    targets = landing_ids[piece.first : piece.first + len(piece.block_ids)]
    count = len(piece.block_ids)
    assert len(targets) == count
    table = np.empty((count, 3), dtype=np.int64)
    table[:, 0] = piece.block_ids
    table[:, 1] = targets
    table[:, :2] *= layout.block_bytes
    table[:, :2] += offset
    table[:, 2] = size
    if size < layout.block_bytes or count < 2:
        return Runs(table)
    is_first = np.ones(count, dtype=np.bool_)
    np.any(table[1:, :2] - table[:-1, :2] != size, axis=1, out=is_first[1:])
    starts = np.flatnonzero(is_first)
    if len(starts) < count:
        table = table[starts]
        table[:-1, 2] *= starts[1:] - starts[:-1]
        table[-1, 2] *= count - starts[-1]
    return Runs(table)
