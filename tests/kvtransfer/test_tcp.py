"""Plain TCP below the contract: strangers are turned away, disorder ends a connection, nobody waits for the frozen."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_pb.v1 import transfer_pb2
from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.fake import FakeBlockStore
from kvtransfer.memory import Memory, copy_threads
from kvtransfer.pieces import Run, Runs
from kvtransfer.transports.cursor import STEP_BYTES, Cursor
from kvtransfer.transports.pairing import TOKEN_BYTES
from kvtransfer.transports.tcp import TcpDoor, TcpStation
from kvtransfer.transports.tcp_link import TcpInbound, TcpOutbound

LOOPBACK = "127.0.0.1"


class Linked:
    """A station, both ends of a link through it, and what happened to them."""

    def __init__(self) -> None:
        self.refused = asyncio.Event()
        self.is_up = asyncio.Event()
        self.lost: list[Exception] = []
        self.source, self.target = FakeBlockStore(), FakeBlockStore()
        self.threads = copy_threads("test")
        self.station = TcpStation(LOOPBACK, 5.0, self.refused.set)
        self.inbound: TcpInbound
        self.outbound: TcpOutbound
        self.extra = b""

    def link_is_up(self) -> None:
        self.is_up.set()

    def lose(self, error: Exception) -> None:
        self.lost.append(error)

    @property
    def port(self) -> int:
        return int.from_bytes(self.extra[:2], "little")


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[Linked]:
    ends = Linked()
    door = TcpDoor(ends.station, LOOPBACK, Memory(ends.target.buffer), ends.threads)
    greeting = door.greet(transfer_pb2.Hello(), None, ends)
    door.sock.close()
    assert isinstance(greeting.link, TcpInbound)
    ends.inbound, ends.extra = greeting.link, greeting.extra
    memory = Memory(ends.source.buffer)
    ends.outbound = await ends.station.connect(LOOPBACK, greeting.extra, memory, ends.threads)
    await ends.is_up.wait()
    try:
        yield ends
    finally:
        await ends.station.close()
        ends.threads.shutdown()


def run(test: Callable[[Linked], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), linked() as ends:
            await test(ends)

    asyncio.run(main())


def test_a_connection_without_a_known_token_is_turned_away() -> None:
    async def test(ends: Linked) -> None:
        with socket.create_connection((LOOPBACK, ends.port)) as stranger:
            stranger.sendall(bytes(TOKEN_BYTES))

            await ends.refused.wait()

            stranger.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        assert not ends.lost

    run(test)


def test_a_piece_that_was_not_announced_next_ends_the_connection() -> None:
    async def test(ends: Linked) -> None:
        receiving = ends.inbound.receive(Runs.of([Run(0, 0, 100)]), 7, False, Stop())
        sending = ends.outbound.send(Runs.of([Run(0, 0, 100)]), 8)

        with pytest.raises(TransferError):
            await receiving

        assert "not announced" in str(ends.lost[0])
        assert set(ends.target.block(0)) == {0}
        await asyncio.wait([sending])

    run(test)


def test_pieces_that_are_over_pass_by_and_the_next_one_arrives() -> None:
    async def test(ends: Linked) -> None:
        ends.source.fill(1, 1)
        size, stop = ends.source.layout.block_bytes, Stop()
        dead, live = (
            Runs.of([Run(0, 0, size)]),
            Runs.of([Run(size, 2 * size, 5), Run(size + 5, 2 * size + 5, size - 5)]),
        )
        ends.inbound.discard(dead, 1)
        stopped = ends.inbound.receive(Runs.of([Run(size, size, size)]), 2, True, stop)
        arriving = ends.inbound.receive(live, 3, True, Stop())

        stop.set()
        assert stopped.done()  # nobody waits for a sender that may be frozen
        for tag, runs in ((1, dead), (2, Runs.of([Run(size, size, size)])), (3, live)):
            ends.outbound.send(runs, tag)

        buffer = memoryview(bytearray(50))
        other = ends.inbound.receive_bytes(buffer, 4)
        ends.inbound.discard_bytes(3, 5)
        ends.outbound.send_bytes(memoryview(b"coded" * 10), 4)
        await ends.outbound.send_bytes(memoryview(b"abc"), 5)

        assert await arriving is not None
        await other
        assert bytes(buffer) == b"coded" * 10
        assert ends.target.block(2) == ends.source.block(1)
        assert set(ends.target.block(0) + ends.target.block(1)) == {0}
        with pytest.raises(TransferError):
            await stopped

    run(test)


@pytest.mark.parametrize("who", ["inbound", "outbound"])
def test_either_end_notices_that_the_other_is_gone(who: str) -> None:
    async def test(ends: Linked) -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends.outbound.on_broken = lambda _: gone.set_result(None)
        receiving = ends.inbound.receive(Runs.of([Run(0, 0, 1000)]), 7, False, Stop())

        getattr(ends, who).close()

        with pytest.raises(TransferError):
            await receiving
        if who == "inbound":
            await gone
        with pytest.raises(TransferError):
            await ends.inbound.receive(Runs.of([Run(0, 0, 1000)]), 8, False, Stop())
        with pytest.raises(TransferError):
            await ends.outbound.send(Runs.of([Run(0, 0, 1000)]), 8)

    run(test)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 3 * STEP_BYTES), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_cursor_offers_every_byte_once_and_in_order(sizes: list[int], rng: Any) -> None:
    data = memoryview(bytes(sum(sizes)))
    at, parts = 0, []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    cursor, begin = Cursor(parts), 0

    while cursor.num_bytes:
        window = cursor.window()
        offered = sum(map(len, window))
        assert 0 < offered <= STEP_BYTES
        assert offered == min(STEP_BYTES, cursor.num_bytes)
        step = rng.randint(1, offered)
        cursor.advance(step)
        begin += step

    assert begin == sum(sizes)
