"""Frames from strangers and broken senders are refused and counted, and harm nobody else."""

import asyncio
import gc
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from baton_pb.v1 import transfer_pb2
from common.errors import TransferError
from kvtransfer.fake import SMALL_LAYOUT
from kvtransfer.landing import BlockLanding
from kvtransfer.transports import shm
from kvtransfer.wire import FRAME_BYTES_MAX, PROTOCOL
from tests.kvtransfer.descriptors import num_descriptors
from tests.kvtransfer.raw_sender import Frame, RawSender

MakePair = Callable[..., AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def raw_sender(pair: Any) -> AsyncIterator[RawSender]:
    sock = await shm.connect(pair.receiver.address.shm_path)
    try:
        yield RawSender(sock, pair.source)
    finally:
        sock.close()


async def good_transfer(pair: Any) -> None:
    landing = pair.receiver.grant([9], 0)
    push = await pair.sender.open_push(landing.ticket)
    push.announce(0, [4])
    await push.finish()
    await landing.landed()
    assert pair.target.block(9) == pair.source.block(4)


def refusals(pair: Any) -> int:
    return sum(entry.refusals for entry in pair.receiver.stats())


def test_a_raw_sender_that_keeps_the_protocol_is_served(make_shm_pair: MakePair) -> None:
    """The helper above speaks the protocol rightly, or the refusals below would prove nothing."""

    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            landing = pair.receiver.grant([1], 0)
            await raw.hello()
            hello = await raw.receive()
            assert hello is not None
            assert hello.hello.worker_id == "receiver"
            await raw.open(landing)
            await raw.send(raw.ready(landing))
            ack = await raw.receive()
            assert ack is not None
            assert ack.WhichOneof("frame") == "ack"
            done = transfer_pb2.Complete(transfer_id=landing.ticket.transfer_id, num_pieces=1)
            await raw.send(Frame(complete=done))

            assert (await landing.landed()).num_bytes == SMALL_LAYOUT.block_bytes
            assert pair.target.block(1) == pair.source.block(3)
            assert refusals(pair) == 0

    asyncio.run(test())


def test_an_open_with_a_piece_is_accepted_and_the_piece_begun(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            landing = pair.receiver.grant([1], 0)
            await raw.hello()
            await raw.receive()
            await raw.send(_opening(landing, raw.ready(landing)))

            answers = [await raw.receive() for _ in range(2)]

            assert [answer and answer.WhichOneof("frame") for answer in answers] == ["open", "ack"]
            assert pair.target.block(1) == pair.source.block(3)
            await landing.abort("seen")

    asyncio.run(test())


@pytest.mark.parametrize(("changes", "answer"), [({"transfer_id": bytes(16)}, None), ({"seq": 1}, "abort")])
def test_an_open_with_a_wrong_piece_is_refused(
    make_shm_pair: MakePair, changes: dict[str, object], answer: str | None
) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            landing = pair.receiver.grant([1], 0)
            await raw.hello()
            await raw.receive()
            await raw.send(_opening(landing, raw.ready(landing, **changes)))

            opened, refused = await raw.receive(), await raw.receive()

            assert opened is not None
            assert (refused and refused.WhichOneof("frame")) == answer
            with pytest.raises(TransferError):
                await landing.landed()
            assert refusals(pair) == 1
            await landing.abort("seen")

    asyncio.run(test())


def test_a_sender_that_ends_at_any_byte_of_an_open_with_a_piece_leaves_all_blocks_to_their_owner(
    make_shm_pair: MakePair,
) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_shm_pair() as pair:
            before = bytes(SMALL_LAYOUT.block_bytes)
            num_bytes = 0
            while True:
                landing = pair.receiver.grant([1], 0)
                async with raw_sender(pair) as raw:
                    payload = _opening(landing, raw.ready(landing)).SerializeToString()
                    data = struct.pack("<I", len(payload)) + payload
                    await raw.hello()
                    await raw.receive()
                    await raw.write(data[:num_bytes])
                async with asyncio.timeout(1):  # long before any lease
                    if num_bytes == len(data):
                        with pytest.raises(TransferError, match="lost"):
                            await landing.landed()
                    await landing.abort("over")
                pair.target.write(1, before)
                await asyncio.sleep(0)
                assert pair.target.block(1) == before
                assert pair.receiver.num_active == 0
                if num_bytes == len(data):
                    break
                num_bytes = min(num_bytes + 7, len(data))
            await good_transfer(pair)

    asyncio.run(test())


def _opening(landing: BlockLanding, ready: Frame) -> Frame:
    ticket = landing.ticket
    return Frame(open=transfer_pb2.Open(transfer_id=ticket.transfer_id, secret=ticket.secret, ready=ready.ready))


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<I", 0) + b"x",
        struct.pack("<I", FRAME_BYTES_MAX + 1),
        struct.pack("<I", 3) + b"\xff\xff\xff",
        struct.pack("<I", 2) + b"\x08\x01",  # a well-formed message with no known frame in it
        random.Random(1).randbytes(5000),
    ],
)
def test_junk_closes_its_own_connection_only(make_shm_pair: MakePair, junk: bytes) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair:
            await good_transfer(pair)
            for greeted in (False, True):
                async with raw_sender(pair) as raw:
                    if greeted:
                        await raw.hello()
                        assert await raw.receive() is not None
                    await raw.write(junk)

                    assert await raw.receive() is None
            assert refusals(pair) == 2
            await good_transfer(pair)

    asyncio.run(test())


def test_a_connection_cut_inside_a_frame_is_counted(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair:
            async with raw_sender(pair) as raw:
                await raw.write(struct.pack("<I", 100) + b"half")
                raw.sock.shutdown(socket.SHUT_WR)

                assert await raw.receive() is None
            assert refusals(pair) == 1

    asyncio.run(test())


@pytest.mark.parametrize(
    "frame",
    [
        Frame(open=transfer_pb2.Open(transfer_id=bytes(16), secret=bytes(32))),
        Frame(ready=transfer_pb2.Ready(transfer_id=bytes(16))),
        Frame(complete=transfer_pb2.Complete(transfer_id=bytes(16))),
        Frame(ack=transfer_pb2.Ack(transfer_id=bytes(16))),
    ],
)
def test_frames_before_hello_close_the_connection(make_shm_pair: MakePair, frame: Frame) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            await raw.send(frame)

            assert await raw.receive() is None
            assert refusals(pair) == 1

    asyncio.run(test())


@pytest.mark.parametrize(
    "changes",
    [{"protocol": 99}, {"num_blocks": 0}, {"num_blocks": 17}, {"num_blocks": 2**32 - 1}, {"worker_id": "x" * 1000}],
)
def test_a_wrong_hello_is_refused(make_shm_pair: MakePair, changes: dict[str, object]) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            await raw.hello(**changes)

            hello, abort = await raw.receive(), await raw.receive()
            assert hello is not None
            assert abort is not None
            assert abort.abort.message
            assert await raw.receive() is None
            assert refusals(pair) == 1

    asyncio.run(test())


def test_a_hello_without_memory_is_refused(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            hello = transfer_pb2.Hello(protocol=PROTOCOL, layout=SMALL_LAYOUT.to_pb(), num_blocks=16)
            await raw.send(Frame(hello=hello))

            _, abort = await raw.receive(), await raw.receive()
            assert abort is not None
            assert "no memory" in abort.abort.message
            assert await raw.receive() is None
            assert refusals(pair) == 1

    asyncio.run(test())


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 1},
        {"first": 1},
        {"first": 2**32 - 1},
        {"source_block_ids": [16]},
        {"source_block_ids": [2**32 - 1]},
        {"source_block_ids": []},
        {"source_block_ids": [3, 3]},
        {"layer_begin": 2, "layer_end": 2},
        {"layer_begin": 3, "layer_end": 1},
        {"layer_end": 4},
        {"layer_end": 2**32 - 1},
        {"num_bytes": 0},
        {"num_bytes": SMALL_LAYOUT.block_bytes - 1},
        {"tag": 1},
        {"checksum": 1},
        {"encoded_bytes": 1},
        {"encoded_bytes": 2**63},
    ],
)
def test_a_wrong_piece_fails_its_transfer_and_writes_nothing_else(
    make_shm_pair: MakePair, changes: dict[str, object]
) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair(checksum_shm=True) as pair, raw_sender(pair) as raw:
            before = [pair.target.block(block) for block in range(16)]
            landing = pair.receiver.grant([1], 0)
            await raw.hello()
            await raw.receive()
            await raw.open(landing)

            await raw.send(raw.ready(landing, **changes))

            with pytest.raises(TransferError):
                await landing.landed()
            answer = await raw.receive()
            assert answer is not None
            assert answer.abort.transfer_id == landing.ticket.transfer_id
            assert [pair.target.block(b) for b in range(16) if b != 1] == [before[b] for b in range(16) if b != 1]
            assert refusals(pair) == 1
            await landing.abort("failed")
            await good_transfer(pair)

    asyncio.run(test())


@pytest.mark.parametrize("sizes", [[0], [16 * SMALL_LAYOUT.block_bytes + 1], [2**63], [100, 100, 100]], ids=str)
def test_a_probe_out_of_bounds_closes_its_connection(make_shm_pair: MakePair, sizes: list[int]) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            await raw.hello()
            await raw.receive()
            for size in sizes[:-1]:
                await raw.send(Frame(probe=transfer_pb2.Probe(num_bytes=size)))
                answer = await raw.receive()
                assert answer is not None
                assert answer.probe.num_bytes == size

            await raw.send(Frame(probe=transfer_pb2.Probe(num_bytes=sizes[-1])))

            assert await raw.receive() is None
            assert refusals(pair) == 1
            await good_transfer(pair)

    asyncio.run(test())


def test_a_repeated_piece_and_an_early_complete_fail_the_transfer(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            await raw.hello()
            await raw.receive()
            for number in range(2):
                landing = pair.receiver.grant([1, 2], 0)
                await raw.open(landing)
                await raw.send(raw.ready(landing))
                if number == 0:
                    await raw.send(raw.ready(landing))
                else:
                    done = transfer_pb2.Complete(transfer_id=landing.ticket.transfer_id, num_pieces=1)
                    await raw.send(Frame(complete=done))

                with pytest.raises(TransferError):
                    await landing.landed()
                await landing.abort("failed")
                while (frame := await raw.receive()) is not None and frame.WhichOneof("frame") != "abort":
                    pass
                assert refusals(pair) == number + 1

    asyncio.run(test())


def test_a_transfer_of_another_connection_cannot_be_touched(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            landing = pair.receiver.grant([1], 0)
            push = await pair.sender.open_push(landing.ticket)
            await raw.hello()
            await raw.receive()

            await raw.send(Frame(abort=transfer_pb2.Abort(transfer_id=landing.ticket.transfer_id)))
            await raw.send(raw.ready(landing))
            assert await raw.receive() is None
            assert refusals(pair) == 1

            push.announce(0, [5])
            await push.finish()
            await landing.landed()
            assert pair.target.block(1) == pair.source.block(5)

    asyncio.run(test())


def test_a_stale_ticket_is_refused_and_counted_each_time(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair, raw_sender(pair) as raw:
            await good_transfer(pair)
            given_up = pair.receiver.grant([1], 0)
            await given_up.abort("given up")
            foreign = pair.receiver.grant([2], 0)
            await raw.hello()
            await raw.receive()

            for number, secret in enumerate((given_up.ticket.secret, bytes(32))):
                transfer_id = (given_up, foreign)[number].ticket.transfer_id
                await raw.send(Frame(open=transfer_pb2.Open(transfer_id=transfer_id, secret=secret)))
                answer = await raw.receive()
                assert answer is not None
                assert answer.abort.transfer_id == transfer_id
                assert refusals(pair) == number + 1
            await foreign.abort("over")

    asyncio.run(test())


def test_a_connection_that_opens_no_ticket_is_closed(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair(connect_timeout_s=0.1) as pair, raw_sender(pair) as raw:
            await raw.hello()
            assert await raw.receive() is not None

            assert await raw.receive() is None
            assert refusals(pair) == 1

    asyncio.run(test())


def test_a_ticket_that_nobody_opens_ends_after_its_lease(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair(lease_s=0.1) as pair:
            landing = pair.receiver.grant([1], 0)

            with pytest.raises(TransferError, match="no progress for"):
                await landing.landed()
            with pytest.raises(TransferError):
                await pair.sender.open_push(landing.ticket)
            await landing.abort("lease")

    asyncio.run(test())


def test_an_open_transfer_outlives_its_lease_while_the_sender_is_alive(make_shm_pair: MakePair) -> None:
    """A prompt may wait for its chunk longer than a lease: the sender's pings say that it still wants to push."""

    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair(lease_s=0.4) as pair:
            landing = pair.receiver.grant([1], 0)
            push = await pair.sender.open_push(landing.ticket)

            await asyncio.sleep(0.8)

            push.announce(0, [3])
            await push.finish()
            await landing.landed()

    asyncio.run(test())


def test_descriptors_passed_by_strangers_are_closed(make_shm_pair: MakePair) -> None:
    async def test() -> None:
        async with asyncio.timeout(10), make_shm_pair() as pair:
            await good_transfer(pair)
            gc.collect()  # what earlier tests left
            before = num_descriptors()
            for _ in range(5):
                async with raw_sender(pair) as raw:
                    fd = pair.source.memfd
                    socket.send_fds(raw.sock, [struct.pack("<I", 5)], [fd, fd])
                    await raw.write(b"x" * 5)
                    assert await raw.receive() is None
            assert num_descriptors() == before

    asyncio.run(test())
