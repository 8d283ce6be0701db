"""UCX below the contract: strangers are turned away, stale messages leave nothing behind, idling is free."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import ucxx._lib.libucxx as ucx

from baton_pb.v1 import transfer_pb2
from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.fake import FakeBlockStore
from kvtransfer.memory import Memory, copy_threads
from kvtransfer.pieces import Run, Runs
from kvtransfer.transports.pairing import TOKEN_BYTES
from kvtransfer.transports.ucx import UcxDoor, UcxStation
from kvtransfer.transports.ucx_driver import FEATURES
from kvtransfer.transports.ucx_link import UcxInbound, UcxOutbound
from tests.kvtransfer.descriptors import num_descriptors

MakePair = Callable[..., AbstractAsyncContextManager[Any]]


def test_nobody_can_read_or_write_this_process_by_ucx() -> None:
    """With remote memory access among the features, whoever reaches the port could."""
    assert not any(feature.value & ucx.Feature.RMA.value for feature in FEATURES)


class Linked:
    """A station, and both ends of a link through it."""

    def __init__(self) -> None:
        self.refused = 0
        self.is_up = asyncio.Event()
        self.is_lost = asyncio.Event()
        self.source, self.target = FakeBlockStore(), FakeBlockStore()
        self.threads = copy_threads("test")
        self.station = UcxStation("127.0.0.1", 5.0, self._count)
        self.inbound: UcxInbound
        self.outbound: UcxOutbound

    def _count(self) -> None:
        self.refused += 1

    def link_is_up(self) -> None:
        self.is_up.set()

    def lose(self, error: Exception) -> None:
        self.is_lost.set()

    def greet(self) -> tuple[UcxInbound, bytes]:
        """Expect one more link; return its receiving end, and what its sender needs."""
        door = UcxDoor(self.station, "127.0.0.1", Memory(self.target.buffer), self.threads)
        greeting = door.greet(transfer_pb2.Hello(), None, self)
        door.sock.close()
        assert isinstance(greeting.link, UcxInbound)
        return greeting.link, greeting.extra

    async def link(self) -> tuple[UcxInbound, UcxOutbound]:
        """Connect once more."""
        self.is_up.clear()
        inbound, offer = self.greet()
        outbound = await self.station.connect("127.0.0.1", offer, Memory(self.source.buffer), self.threads)
        await self.is_up.wait()
        return inbound, outbound

    async def __aenter__(self) -> "Linked":
        self.inbound, self.outbound = await self.link()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.station.close()
        self.threads.shutdown()


def run(test: Callable[[Linked], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), Linked() as linked:
            await test(linked)

    asyncio.run(main())


def test_messages_of_a_dead_transfer_pass_by_and_leave_the_sender_free() -> None:
    async def test(linked: Linked) -> None:
        before = bytes(linked.target.buffer)
        single, packed = Runs.of([Run(20, 20, 9000)]), Runs.of([Run(0, 0, 10), Run(20, 20, 9000)])
        message = memoryview(bytearray(packed.num_bytes))
        sendings = [linked.outbound.send(single, 100), linked.outbound.send_bytes(message, 200)]
        linked.inbound.discard(single, 100)
        linked.inbound.discard(packed, 200)
        await asyncio.gather(*sendings)
        assert bytes(linked.target.buffer) == before

        linked.source.fill(1, 1)
        size = linked.source.layout.block_bytes
        live = Runs.of([Run(size, 0, size)])
        receiving = linked.inbound.receive(live, 300, True, Stop())
        await linked.outbound.send(live, 300)
        assert await receiving is not None
        assert linked.target.block(0) == linked.source.block(1)

    run(test)


def test_a_receive_without_a_message_ends_when_the_link_is_closed() -> None:
    async def test(linked: Linked) -> None:
        receiving = linked.inbound.receive(Runs.of([Run(0, 0, 1000)]), 7, False, Stop())

        linked.inbound.close()

        with pytest.raises(TransferError):
            await receiving
        with pytest.raises(TransferError):
            await linked.inbound.receive(Runs.of([Run(0, 0, 1000)]), 8, False, Stop())

    run(test)


def test_a_receive_without_a_message_ends_when_the_sender_closes() -> None:
    async def test(linked: Linked) -> None:
        receiving = linked.inbound.receive(Runs.of([Run(0, 0, 1000)]), 7, False, Stop())

        linked.outbound.close()

        with pytest.raises(TransferError):
            await receiving
        await linked.is_lost.wait()

    run(test)


def test_closing_one_link_leaves_what_is_under_way_on_others_alone() -> None:
    async def test(linked: Linked) -> None:
        linked.source.fill(2, 2)
        size = linked.source.layout.block_bytes
        runs = Runs.of([Run(2 * size, 0, size)])
        receiving = linked.inbound.receive(runs, 7, False, Stop())
        for closed_by_sender in (False, True):
            inbound, outbound = await linked.link()
            doomed = inbound.receive(Runs.of([Run(0, size, size)]), 8 + closed_by_sender, False, Stop())
            (outbound if closed_by_sender else inbound).close()
            with pytest.raises(TransferError):
                await doomed

        assert not receiving.done()
        await linked.outbound.send(runs, 7)
        await receiving

        assert linked.target.block(0) == linked.source.block(2)

    run(test)


def test_a_hundred_links_of_one_pair_one_after_another_all_carry_and_leave_no_descriptor() -> None:
    async def test(linked: Linked) -> None:
        size = linked.source.layout.block_bytes
        descriptors = []
        for cycle in range(1, 101):
            inbound, outbound = await linked.link()
            linked.source.fill(1, cycle)
            runs = Runs.of([Run(size, 0, size)])
            receiving = inbound.receive(runs, cycle, True, Stop())
            await outbound.send(runs, cycle)
            assert await receiving is not None
            assert linked.target.block(0) == linked.source.block(1)

            linked.is_lost.clear()
            if cycle % 2:
                inbound.close()
            else:
                outbound.close()
                await linked.is_lost.wait()
            descriptors.append(num_descriptors())
        assert max(descriptors[10:]) < max(descriptors[:10]) + 10  # one left by each would make 90

    run(test)


def test_an_endpoint_without_a_known_token_is_turned_away() -> None:
    async def test(linked: Linked) -> None:
        offer = linked.station.expect(linked.inbound)
        forged = offer[:2] + os.urandom(TOKEN_BYTES)
        memory = Memory(linked.source.buffer)

        stranger = await linked.station.connect("127.0.0.1", forged, memory, linked.threads)
        with pytest.raises(TransferError):
            await stranger.send(Runs.of([Run(0, 0, 1 << 14)]), 1)

        assert linked.refused == 1

    run(test)


def test_a_connection_that_is_given_up_while_it_is_made_disturbs_no_other() -> None:
    async def test(linked: Linked) -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        (_, offer), memory = linked.greet(), Memory(linked.source.buffer)
        connecting = asyncio.create_task(linked.station.connect("127.0.0.1", offer, memory, linked.threads))
        while not linked.station.driver._pending:  # noqa: ASYNC110  (a request raises no event)
            await asyncio.sleep(0)

        connecting.cancel()

        with pytest.raises(asyncio.CancelledError):
            await connecting
        receiving = linked.inbound.receive(Runs.of([Run(0, 0, 1 << 14)]), 1, True, Stop())
        await linked.outbound.send(Runs.of([Run(0, 0, 1 << 14)]), 1)
        assert await receiving is not None
        assert not problems, problems

    run(test)


def test_an_idle_driver_uses_no_processor() -> None:
    async def test(linked: Linked) -> None:
        waiting = linked.inbound.receive(Runs.of([Run(0, 0, 100)]), 5, False, Stop())
        await asyncio.sleep(0.05)
        before = os.times()

        await asyncio.sleep(0.5)

        after = os.times()
        assert after.user + after.system - before.user - before.system <= 0.1
        assert not waiting.done()
        linked.inbound.close()
        with pytest.raises(TransferError):
            await waiting

    run(test)
