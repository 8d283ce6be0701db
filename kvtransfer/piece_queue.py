"""What was announced on one connection and has not gone out: pieces of many pushes, which take turns."""

from collections import deque
from typing import NamedTuple

from kvtransfer.layout import BlockLayout
from kvtransfer.pieces import PIECE_BYTES_MAX, Piece, blocks_together, joined, part_of
from kvtransfer.push import BlockPush


class Part(NamedTuple):
    """What of a piece goes out at once."""

    push: BlockPush
    piece: Piece
    num_bytes: int


class _Waiting(NamedTuple):
    push: BlockPush
    piece: Piece
    begin: int
    """First of its blocks that has not gone out."""


class PieceQueue:
    """Owned by an `OutboundPeer`."""

    def __init__(self, layout: BlockLayout) -> None:
        self.part_bytes_max = PIECE_BYTES_MAX
        """Longer pieces go out in parts."""
        self._layout = layout
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, push: BlockPush, piece: Piece) -> None:
        """Add a piece; layers that have to wait together travel together."""
        last = self._waiting[-1] if self._waiting else None
        both = joined(last.piece, piece) if last is not None and last.push is push and not last.begin else None
        if both is not None:
            self._waiting[-1] = _Waiting(push, both, 0)
        else:
            push.queued(1)
            self._waiting.append(_Waiting(push, piece, 0))

    def take(self, num_bytes_max: int | None) -> Part | None:
        """Return the next part, unless there is none or it is longer; what is left of its piece goes to the end."""
        while self._waiting and self._waiting[0].push.is_over:
            self._waiting.popleft()
        if not self._waiting:
            return None
        push, whole, begin = self._waiting[0]
        end = min(begin + self._blocks_together(whole), len(whole.block_ids))
        num_bytes = (end - begin) * len(whole.layers) * self._layout.layer_bytes
        if num_bytes_max is not None and num_bytes > num_bytes_max:
            return None
        self._waiting.popleft()
        if end < len(whole.block_ids):
            push.queued(1)
            self._waiting.append(_Waiting(push, whole, end))
        return Part(push, part_of(whole, begin, end - begin), num_bytes)

    def is_one_part(self, piece: Piece) -> bool:
        """Whether a piece would go out whole."""
        return len(piece.block_ids) <= self._blocks_together(piece)

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()

    def _blocks_together(self, piece: Piece) -> int:
        return blocks_together(len(piece.layers), self._layout, self.part_bytes_max)
