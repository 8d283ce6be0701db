"""A queue looks at each block of a piece once, however many parts it goes out in and however often there is no room."""

import asyncio
from typing import Any

from kvtransfer.fake import SMALL_LAYOUT
from kvtransfer.piece_queue import PieceQueue
from kvtransfer.pieces import Piece
from tests.kvtransfer.test_push import RecordingPeer, new_push


class Counted(tuple[int, ...]):
    """Counts the elements that are copied out of it."""

    __slots__ = ()
    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        Counted.num_copied += len(part)
        return part


def test_a_piece_of_many_parts_is_copied_once() -> None:
    async def test() -> None:
        queue = PieceQueue(SMALL_LAYOUT._replace(head_dim=64 * 64))
        blocks = Counted(range(131_072 // 16))
        queue.put(new_push(RecordingPeer()), Piece(0, blocks, range(SMALL_LAYOUT.num_layers)))
        parts = []

        while queue:
            assert queue.take(1) is None  # no room
            part = queue.take(None)
            assert part is not None
            parts.append(part.piece)

        assert len(parts) > 100
        assert [block for part in parts for block in part.block_ids] == list(blocks)
        assert Counted.num_copied == len(blocks)

    asyncio.run(test())
