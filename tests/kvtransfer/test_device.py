"""A pool in a device exchanges blocks with any other over any wire, and never passes for memory of the host."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.config import TransferConfig
from common.errors import BatonError, ConfigError, TransferError, WorkerLostError
from kvtransfer.activity import Stop
from kvtransfer.device import DeviceBuffer, DeviceMemory
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.fake_device import FakeCommunicators, FakeDevice, FakeDeviceStore
from kvtransfer.memory import block_bytes_of
from kvtransfer.pieces import Run, Runs
from kvtransfer.transports.nccl_link import NcclInbound, NcclOutbound

MakePair = Callable[..., AbstractAsyncContextManager[Any]]
Store = FakeBlockStore | FakeDeviceStore
LIMIT_S = 20.0


@pytest.mark.parametrize("settings", [{}, {"codec": "lossless"}, {"sealed": True}, {"checksum": False}])
def test_one_pool_in_a_device_and_one_in_host_memory_understand_each_other(
    make_mixed_pair: MakePair, settings: dict[str, Any]
) -> None:
    async def test() -> None:
        async with asyncio.timeout(20), make_mixed_pair(**settings) as pair:
            landing = pair.receiver.grant([3, 4, 9], 0)
            push = await pair.sender.open_push(landing.ticket)
            push.announce(0, [7, 8, 1], range(1))
            push.announce(0, [7, 8, 1], range(1, 3))
            await asyncio.gather(push.finish(), landing.landed())

            assert [pair.target.block(block) for block in (3, 4, 9)] == [pair.source.block(b) for b in (7, 8, 1)]

    asyncio.run(test())


@pytest.mark.parametrize(("source", "target"), [(FakeDeviceStore, FakeBlockStore), (FakeBlockStore, FakeDeviceStore)])
def test_auto_goes_over_a_wire_on_one_host_too_where_a_pool_lies_in_a_device(
    source: type[Store], target: type[Store]
) -> None:
    async def test() -> None:
        sender = await TransferEndpoint.start("sender", "127.0.0.1", source(), TransferConfig())
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target(), TransferConfig())
        try:
            async with asyncio.timeout(20):
                landing = receiver.grant([1], 0)
                push = await sender.open_push(landing.ticket)
                push.announce(0, [2])
                assert (await push.finish()).transport == "ucx"
                await landing.landed()
        finally:
            await sender.close()
            await receiver.close()

    asyncio.run(test())


def test_a_pool_in_a_device_cannot_be_shared_memory() -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="no memfd to share"):
            await TransferEndpoint.start("sender", "127.0.0.1", FakeDeviceStore(), TransferConfig(transport="shm"))

    asyncio.run(test())


@pytest.mark.parametrize("kind", [FakeBlockStore, FakeDeviceStore])
def test_a_block_is_read_and_overwritten_where_it_lies(kind: type[Store]) -> None:
    store = kind()
    store.fill(2, 5)
    before = store.block(2)

    with block_bytes_of(store, 2) as source, block_bytes_of(store, 3, is_written=True) as target:
        target[:] = source

    assert store.block(3) == store.block(2) == before
    assert not any(store.block(4))


def test_a_block_in_a_device_stays_as_it_was_when_writing_it_fails() -> None:
    store = FakeDeviceStore()
    store.fill(2, 5)
    before = store.block(2)

    def decode_half() -> None:
        with block_bytes_of(store, 2, is_written=True) as block:
            block[:8] = bytes(8)
            raise TransferError("cannot be decoded")

    with pytest.raises(TransferError):
        decode_half()

    assert store.block(2) == before


def test_what_is_not_wanted_any_more_does_not_reach_the_pool() -> None:
    store = FakeDeviceStore()
    assert store.device is not None
    memory, stop = DeviceMemory(store.device), Stop()
    stop.set()
    size = SMALL_LAYOUT.block_bytes

    with pytest.raises(TransferError):
        memory.scatter(memoryview(b"\xff" * size), Runs.of([Run(0, 0, size)]), stop)
    with pytest.raises(TransferError):
        memory.gather(Runs.of([Run(0, 0, size)]), memoryview(bytearray(size)), stop)

    assert not any(store.block(0))


class FailingDevice(FakeDevice):
    """Its copies fail while it is broken, with an error that nobody here has heard of."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        super().__init__(pool)
        self.is_broken = False

    def gather(self, runs: Runs, target: DeviceBuffer) -> None:
        self._check()
        super().gather(runs, target)

    def scatter(self, source: DeviceBuffer, runs: Runs) -> None:
        self._check()
        super().scatter(source, runs)

    def _check(self) -> None:
        if self.is_broken:
            raise RuntimeError("an illegal address")


@pytest.mark.parametrize("wire", ["tcp", "ucx"])
@pytest.mark.parametrize("broken", ["sender", "receiver"])
def test_a_copy_that_fails_in_a_device_fails_its_transfer_at_both_ends_before_any_lease(wire: str, broken: str) -> None:
    async def test() -> None:
        config = TransferConfig.model_validate({"transport": wire, "lease_s": 2 * LIMIT_S})
        pools = {name: np.zeros((16, SMALL_LAYOUT.block_bytes), np.uint8) for name in ("sender", "receiver")}
        devices = {name: FailingDevice(pool.reshape(-1)) for name, pool in pools.items()}
        ends: dict[str, TransferEndpoint] = {}
        pools["sender"][3:5] = 7
        try:
            for name, device in devices.items():
                store = FakeDeviceStore()
                store.device = device
                ends[name] = await TransferEndpoint.start(name, "127.0.0.1", store, config)
            sender, receiver = ends["sender"], ends["receiver"]
            async with asyncio.timeout(LIMIT_S):
                landing = receiver.grant([1, 2], 0)
                push = await sender.open_push(landing.ticket)
                devices[broken].is_broken = True
                push.announce(0, [3, 4])
                with pytest.raises(TransferError):
                    await push.finish()
                with pytest.raises(TransferError, match="illegal address"):
                    await landing.landed()
                await push.abort("failed")
                await landing.abort("failed")
                assert sender.num_active == receiver.num_active == 0
                assert not pools["receiver"].any()

                devices[broken].is_broken = False
                landing = receiver.grant([1, 2], 0)
                push = await sender.open_push(landing.ticket)
                push.announce(0, [3, 4])
                await asyncio.gather(push.finish(), landing.landed())
        finally:
            for end in ends.values():
                await end.close()
        assert (pools["receiver"][1:3] == 7).all()

    asyncio.run(test())


def test_auto_takes_nccl_between_two_devices_but_not_from_one_to_itself() -> None:
    async def test() -> None:
        communicators = FakeCommunicators()
        stores = [FakeDeviceStore(communicators=communicators) for _ in range(2)]
        for number, is_same in enumerate([False, True]):
            ends = [
                await TransferEndpoint.start(f"{name}-{number}", "127.0.0.1", store, TransferConfig())
                for name, store in zip(("sender", "receiver"), stores, strict=True)
            ]
            sender, receiver = ends
            if is_same:
                receiver.address.device_id = sender.address.device_id
            try:
                async with asyncio.timeout(20):
                    landing = receiver.grant([1], 0)
                    push = await sender.open_push(landing.ticket)
                    push.announce(0, [2])
                    assert (await push.finish()).transport == ("ucx" if is_same else "nccl")
                    await landing.landed()
            finally:
                for end in ends:
                    await end.close()

    asyncio.run(test())


@pytest.mark.parametrize(("kind", "words"), [(FakeBlockStore, "host memory"), (FakeDeviceStore, "without NCCL")])
def test_nccl_is_refused_where_there_is_none(kind: type[Store], words: str) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=words):
            await TransferEndpoint.start("sender", "127.0.0.1", kind(), TransferConfig(transport="nccl"))

    asyncio.run(test())


def test_a_receiver_whose_communicator_fails_is_lost_and_its_blocks_come_back() -> None:
    async def test() -> None:
        communicators = FakeCommunicators()
        stores = [FakeDeviceStore(communicators=communicators) for _ in range(2)]
        config = TransferConfig(transport="nccl")
        sender = await TransferEndpoint.start("sender", "127.0.0.1", stores[0], config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", stores[1], config)
        try:
            async with asyncio.timeout(20):
                landing = receiver.grant([1, 2], 0)
                push = await sender.open_push(landing.ticket)
                communicators.abort_all()
                push.announce(0, [3, 4])

                with pytest.raises(WorkerLostError):
                    await push.finish()
                with pytest.raises(TransferError):
                    await landing.landed()
                await push.abort("failed")
                await landing.abort("failed")
                assert sender.num_active == receiver.num_active == 0

                again = receiver.grant([1], 0)  # over a new communicator
                push = await sender.open_push(again.ticket)
                push.announce(0, [3])
                await asyncio.gather(push.finish(), again.landed())
        finally:
            await sender.close()
            await receiver.close()
        assert stores[1].block(1) == stores[0].block(3)

    asyncio.run(test())


class Owner:
    """A control connection that only notes what its link says."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.lost: list[BatonError] = []

    def link_is_up(self) -> None:
        self.up.set()

    def lose(self, error: BatonError) -> None:
        self.lost.append(error)


class Linked:
    """Two ends of an NCCL link over a fake communicator, and their pools."""

    def __init__(self) -> None:
        self.communicators, self.owner, self.stop = FakeCommunicators(), Owner(), Stop()
        self.source, self.target = FakeDeviceStore(), FakeDeviceStore()
        self.source.fill(0, 3)
        assert self.source.device is not None
        assert self.target.device is not None
        name = self.communicators.new_id()
        self.inbound = NcclInbound(self.target.device, self.communicators, name, self.owner)
        self.outbound = NcclOutbound(self.source.device, self.communicators, name)
        self.runs = Runs.of([Run(0, 0, SMALL_LAYOUT.block_bytes)])


@asynccontextmanager
async def linked() -> AsyncIterator[Linked]:
    link = Linked()
    async with asyncio.timeout(LIMIT_S):
        await link.owner.up.wait()
        yield link
        for end in (link.inbound, link.outbound):
            end.close()
            await end.lane.ended


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_message_under_another_tag_breaks_the_nccl_link_and_is_not_written(is_wanted: bool) -> None:
    async def test() -> None:
        async with linked() as link:
            sending = link.outbound.send(link.runs, 6)
            _, digest = await asyncio.gather(sending, link.inbound.receive(link.runs, 6, True, link.stop))
            assert (digest, link.target.block(0)) == (None, link.source.block(0))
            link.target.write(0, bytes(SMALL_LAYOUT.block_bytes))

            link.outbound.send(link.runs, 7)
            if is_wanted:
                with pytest.raises(TransferError, match="not announced next"):
                    await link.inbound.receive(link.runs, 8, True, link.stop)
            else:
                link.inbound.discard(link.runs, 8)

            await link.inbound.lane.ended
        assert len(link.owner.lost) == 1
        assert not any(link.target.block(0))

    asyncio.run(test())


def test_a_piece_that_is_not_wanted_any_more_leaves_the_nccl_link_whole() -> None:
    async def test() -> None:
        async with linked() as link:
            link.stop.set()

            sending = link.outbound.send(link.runs, 6)
            with pytest.raises(TransferError, match="stopped"):
                await link.inbound.receive(link.runs, 6, True, link.stop)
            await sending

            assert not any(link.target.block(0))
            await asyncio.gather(link.outbound.send(link.runs, 7), link.inbound.receive(link.runs, 7, True, Stop()))
            assert link.owner.lost == []
        assert link.target.block(0) == link.source.block(0)

    asyncio.run(test())


def test_a_communicator_that_fails_under_an_unwanted_piece_breaks_the_nccl_link_all_the_same() -> None:
    async def test() -> None:
        async with linked() as link:
            receiving = link.inbound.receive(link.runs, 6, True, link.stop)
            link.stop.set()
            link.communicators.abort_all()

            with pytest.raises(TransferError, match="aborted"):
                await receiving

            assert len(link.owner.lost) == 1

    asyncio.run(test())


def test_a_transfer_given_up_half_way_costs_no_communicator() -> None:
    async def test() -> None:
        communicators = FakeCommunicators()
        stores = [FakeDeviceStore(communicators=communicators) for _ in range(2)]
        config = TransferConfig(transport="nccl")
        sender = await TransferEndpoint.start("sender", "127.0.0.1", stores[0], config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", stores[1], config)
        try:
            for turn in range(12):
                async with asyncio.timeout(20):
                    landing = receiver.grant([1, 2], 0)
                    push = await sender.open_push(landing.ticket)
                    push.announce(0, [3, 4])
                    for _ in range(turn):
                        await asyncio.sleep(0)
                    await landing.abort("changed its mind")
                    with pytest.raises(TransferError):
                        await push.finish()
                    await push.abort("so be it")
        finally:
            await sender.close()
            await receiver.close()
        assert communicators.num_joined == 1

    asyncio.run(test())
