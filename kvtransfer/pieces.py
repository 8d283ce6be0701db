"""From block ids to byte ranges: what one piece of a transfer copies from where to where."""

from collections.abc import Sequence
from typing import NamedTuple

from kvtransfer.layout import BlockLayout

PIECE_BYTES_MAX = 4 * 1024 * 1024
"""Large announcements are cut here, so that the sender hashes one piece while the receiver copies the one before."""
PIECE_BLOCKS_MAX = 8192


class Run(NamedTuple):
    """Contiguous in both pools: offsets in bytes from their beginnings."""

    source: int
    target: int
    num_bytes: int


class Piece(NamedTuple):
    """Some layers of some blocks; the unit of announcement, checksum and acknowledgement."""

    first: int
    block_ids: tuple[int, ...]
    layers: range


def piece_bytes(piece: Piece, layout: BlockLayout) -> int:
    """Bytes in a piece."""
    return len(piece.block_ids) * len(piece.layers) * layout.layer_bytes


def cut(piece: Piece, layout: BlockLayout) -> list[Piece]:
    """Cut along blocks into pieces of at most `PIECE_BYTES_MAX` (or one block, if that is larger)."""
    per_block = len(piece.layers) * layout.layer_bytes
    step = min(max(PIECE_BYTES_MAX // per_block, 1), PIECE_BLOCKS_MAX)
    return [
        Piece(piece.first + at, piece.block_ids[at : at + step], piece.layers)
        for at in range(0, len(piece.block_ids), step)
    ]


def runs_of(piece: Piece, landing_ids: Sequence[int], layout: BlockLayout) -> list[Run]:
    """Return what to copy, in the order of the blocks; whole blocks that are neighbours on both sides become one run.

    Args:
        piece: names the source blocks.
        landing_ids: all landing blocks of the ticket.
        layout: of both pools.
    """
    offset = piece.layers.start * layout.layer_bytes
    size = len(piece.layers) * layout.layer_bytes
    targets = landing_ids[piece.first : piece.first + len(piece.block_ids)]
    runs: list[Run] = []
    for source_id, target_id in zip(piece.block_ids, targets, strict=True):
        source, target = source_id * layout.block_bytes + offset, target_id * layout.block_bytes + offset
        last = runs[-1] if runs else None
        if last and last.source + last.num_bytes == source and last.target + last.num_bytes == target:
            runs[-1] = last._replace(num_bytes=last.num_bytes + size)
        else:
            runs.append(Run(source, target, size))
    return runs
