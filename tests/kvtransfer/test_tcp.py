"""Plain TCP below the contract: strangers are turned away, disorder ends a connection, nobody waits for the frozen."""

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_pb.v1 import transfer_pb2
from common.errors import TransferError
from kvtransfer import native
from kvtransfer.activity import Stop
from kvtransfer.fake import FakeBlockStore
from kvtransfer.memory import Memory, copy_threads
from kvtransfer.pieces import Run, Runs
from kvtransfer.transports.cursor import Cursor
from kvtransfer.transports.pairing import TOKEN_BYTES
from kvtransfer.transports.tcp import TcpDoor, TcpStation
from kvtransfer.transports.tcp_link import TcpInbound, TcpOutbound
from kvtransfer.transports.tcp_piece import HEADER

LOOPBACK = "127.0.0.1"


class Linked:
    """A station, both ends of a link through it, and what happened to them."""

    def __init__(self, station: TcpStation | None) -> None:
        self.refused = asyncio.Event()
        self.is_up = asyncio.Event()
        self.lost: list[Exception] = []
        self.source, self.target = FakeBlockStore(), FakeBlockStore()
        self.threads = copy_threads("test")
        self.station = station or TcpStation(LOOPBACK, 5.0, self.refused.set)
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
async def linked(station: TcpStation | None = None) -> AsyncIterator[Linked]:
    ends = Linked(station)
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
        if station is None:
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


def test_pieces_for_which_nobody_waits_any_more_hold_up_no_later_one() -> None:
    async def test(ends: Linked) -> None:
        ends.source.fill(0, 1)
        runs = [Runs.of([Run(offset, offset, 100)]) for offset in (0, 100, 200)]
        receiving = [ends.inbound.receive(each, tag, False, Stop()) for tag, each in enumerate(runs)]
        sending = [ends.outbound.send(each, tag) for tag, each in enumerate(runs)]

        for nobodys_receiving, nobodys_sending in zip(receiving[:2], sending[:2], strict=True):
            nobodys_receiving.cancel()
            nobodys_sending.cancel()

        await asyncio.gather(receiving[2], sending[2])
        assert bytes(ends.target.buffer[200:300]) == bytes(ends.source.buffer[200:300])
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


def test_a_piece_that_is_given_up_midway_is_written_no_further() -> None:
    async def test(ends: Linked) -> None:
        size, stop = ends.source.layout.block_bytes, Stop()
        ends.source.fill(1, 1)
        given_up = ends.inbound.receive(Runs.of([Run(0, 0, 2 * size)]), 1, True, stop)
        following = ends.inbound.receive(Runs.of([Run(size, 2 * size, size)]), 2, True, Stop())
        hose = ends.outbound._sock
        ends.outbound._loop.remove_reader(hose)
        await asyncio.get_running_loop().sock_sendall(hose, HEADER.pack(1, 2 * size) + bytes([7]) * size)
        while ends.target.block(0) != bytes([7]) * size:  # noqa: ASYNC110  (bytes raise no event)
            await asyncio.sleep(0)

        stop.set()

        with pytest.raises(TransferError):
            await given_up
        await asyncio.get_running_loop().sock_sendall(hose, bytes([7]) * size)
        ends.outbound.send(Runs.of([Run(size, 2 * size, size)]), 2)
        assert await following is not None
        assert ends.target.block(2) == ends.source.block(1)
        assert set(ends.target.block(1)) == {0}

    run(test)


def test_peers_that_do_not_read_keep_no_thread() -> None:
    async def test(ends: Linked) -> None:
        async with contextlib.AsyncExitStack() as stack:
            data = memoryview(bytes(64 * 1024 * 1024))  # more than sockets take
            for _ in range(8):
                stuck = await stack.enter_async_context(linked(ends.station))
                stuck.outbound.send_bytes(data, 1)
            arriving = ends.inbound.receive(Runs.of([Run(0, 0, 1000)]), 7, True, Stop())
            await ends.outbound.send(Runs.of([Run(0, 0, 1000)]), 7)

            assert await arriving is not None

    run(test)


def test_without_a_compiler_bytes_arrive_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ends: Linked) -> None:
        rng = random.Random(3)
        data = memoryview(rng.randbytes(20 * 1024 * 1024))
        buffer = memoryview(bytearray(len(data)))
        arriving = ends.inbound.receive_bytes(buffer, 1)
        ends.outbound.send_bytes(data, 1)

        await arriving

        assert buffer == data

    monkeypatch.setattr(native, "library", lambda: None)
    run(test)


def test_what_precedes_a_piece_leaves_it_in_line_with_memory() -> None:
    """See HEADER: a copy into a place just behind that of its source, modulo a page, takes ten times as long."""
    assert HEADER.size % 64 == 0
    assert TOKEN_BYTES % 64 == 0


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=20), st.booleans(), st.data())
def test_a_cursor_moves_every_byte_once_and_in_order(sizes: list[int], is_compiled: bool, data: Any) -> None:
    """Scattered to scattered, cut differently at both ends, through a socket that takes a part at a time."""
    content = random.Random(1).randbytes(sum(sizes))
    cuts = sorted(data.draw(st.lists(st.integers(1, max(1, len(content) - 1)), max_size=20, unique=True)))
    sources, at = [], 0
    for size in sizes:
        sources.append(memoryview(content[at : at + size]))
        at += size
    targets = [memoryview(bytearray(end - begin)) for begin, end in itertools.pairwise([0, *cuts, len(content)])]
    sending, receiving = Cursor.of(*sources), Cursor.of(*(target for target in targets if len(target)))

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if not is_compiled:
            patch.setattr(native, "library", lambda: None)
        ours, theirs = (stack.enter_context(sock) for sock in socket.socketpair())
        for sock in (ours, theirs):
            sock.setblocking(False)
        while receiving.num_bytes:
            sending.send(ours)
            receiving.receive(theirs, Stop())

    assert sending.num_bytes == 0
    assert b"".join(targets) == content
