"""A pool in a device exchanges blocks with any other over any wire, and never passes for memory of the host."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from common.config import TransferConfig
from common.errors import ConfigError, TransferError
from kvtransfer.activity import Stop
from kvtransfer.device import DeviceMemory
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore, FakeDeviceStore
from kvtransfer.memory import block_bytes_of
from kvtransfer.pieces import Run, Runs

MakePair = Callable[..., AbstractAsyncContextManager[Any]]
Store = FakeBlockStore | FakeDeviceStore


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
