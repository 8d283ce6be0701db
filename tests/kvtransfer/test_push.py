"""A push lets go of its source only when nothing of this process reads it, and vouches for it only after every Ack."""

import asyncio

import pytest

from baton_pb.v1 import transfer_pb2
from common.errors import BatonError
from kvtransfer.fake import SMALL_LAYOUT
from kvtransfer.pieces import Piece
from kvtransfer.push import BlockPush
from kvtransfer.ticket import make_ticket, read_ticket
from kvtransfer.wire import FrameError

PIECE = Piece(0, (0,), range(1))


class RecordingPeer:
    """A `ReceiverPeer` that notes what the push does."""

    transport = "none"
    last_ack = last_sent = 0.0
    num_source_blocks = 8

    def __init__(self) -> None:
        self.kinds: list[str | None] = []
        self.is_lost = asyncio.Event()

    def enqueue(self, push: BlockPush, piece: Piece) -> None:
        push.queued(1)

    def give_back(self, num_bytes: int) -> None:
        pass

    def send(self, frame: transfer_pb2.TransferFrame) -> None:
        self.kinds.append(frame.WhichOneof("frame"))

    def lose(self, error: BatonError) -> None:
        self.is_lost.set()


def new_push(peer: RecordingPeer, lease_s: float = 60.0) -> BlockPush:
    address = transfer_pb2.TransferAddress(worker_id="d")
    ticket = make_ticket(address, [1, 2], 0, SMALL_LAYOUT, lease_s, checksum=True)
    return BlockPush(peer, read_ticket(ticket, SMALL_LAYOUT), ticket.block_ids)


def test_abort_waits_for_whoever_still_reads_the_source() -> None:
    async def test() -> None:
        push = new_push(RecordingPeer())
        push.activity.begin()

        aborting = asyncio.create_task(push.abort("over"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not aborting.done()

        push.activity.end()
        await aborting

    asyncio.run(test())


def test_abort_breaks_the_link_when_nothing_moves_for_the_senders_lease() -> None:
    async def test() -> None:
        peer = RecordingPeer()
        push = new_push(peer, lease_s=0.1)
        push.activity.begin()

        aborting = asyncio.create_task(push.abort("over"))
        await peer.is_lost.wait()
        assert not aborting.done()

        push.activity.end()
        await aborting

    asyncio.run(test())


def test_complete_follows_the_last_acknowledgement() -> None:
    async def test() -> None:
        peer = RecordingPeer()
        push = new_push(peer)
        for block in (0, 1):
            push.announce(block, [block])
        seqs = [push.number(PIECE, 100, 1).seq for _ in range(2)]
        finishing = asyncio.create_task(push.finish())
        await asyncio.sleep(0)
        push.acknowledged(seqs[1])
        assert peer.kinds == []
        with pytest.raises(FrameError):
            push.completed()

        push.acknowledged(seqs[0])
        assert peer.kinds == ["complete"]
        push.completed()

        assert (await finishing).num_bytes == 200
        with pytest.raises(FrameError):
            new_push(peer).acknowledged(0)

    asyncio.run(test())


def test_complete_need_not_wait_for_acknowledgements_of_what_left_the_source() -> None:
    async def test() -> None:
        peer = RecordingPeer()
        push = new_push(peer)
        for block in (0, 1):
            push.announce(block, [block])
        seqs = [push.number(PIECE, 100, 1).seq for _ in range(2)]
        finishing = asyncio.create_task(push.finish())
        await asyncio.sleep(0)
        push.source_read(seqs[1])
        assert peer.kinds == []

        push.source_read(seqs[0])
        assert peer.kinds == ["complete"]
        with pytest.raises(FrameError):
            push.completed()

        for seq in seqs:
            push.acknowledged(seq)
        assert peer.kinds == ["complete"]
        push.completed()
        assert (await finishing).num_bytes == 200

    asyncio.run(test())


def test_tags_of_runs_follow_each_other_and_differ_between_tickets() -> None:
    async def test() -> None:
        push, other = new_push(RecordingPeer()), new_push(RecordingPeer())
        push.announce(0, [0, 1])
        first = push.number(PIECE, 100, 3).tag

        assert push.number(PIECE, 100, 1).tag == (first + 3) % 2**64
        assert other.number(PIECE, 100, 1).tag != first
        push.fail(BatonError("over"))

    asyncio.run(test())
