"""A pool of bytes with scales travels as it is, or losslessly: what is quantised already is not quantised again."""

import asyncio
from typing import Any

import numpy as np
import pytest

from common.config import TransferConfig
from common.errors import MismatchError, TransferError
from kvtransfer.codecs.base import Slabs
from kvtransfer.codecs.registry import AUTO, CODECS, codec_for, is_lossy
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import FakeBlockStore
from kvtransfer.layout import BlockLayout

BYTES = BlockLayout("m", "int8", 16, 3, 2, 64)
HALVES = BYTES._replace(dtype="float16")


@pytest.mark.parametrize("name", [AUTO, *CODECS])
def test_a_codec_that_loses_something_is_replaced_where_values_have_scales(name: str) -> None:
    assert codec_for(HALVES, name) == name
    assert codec_for(BYTES, name) == ("raw" if is_lossy(name) else name)


@pytest.mark.parametrize("name", [name for name in CODECS if not is_lossy(name)])
def test_values_and_scales_come_back_byte_for_byte(name: str) -> None:
    codec, slabs = CODECS[name], Slabs.of(BYTES, num_blocks=5, num_layers=2)
    assert slabs.num_bytes == 5 * 2 * BYTES.layer_bytes
    raw = np.random.default_rng(3).integers(0, 40, slabs.num_bytes, dtype=np.uint8)
    decoded = np.empty_like(raw)

    encoded = codec.encode(raw.data, slabs)
    codec.decode(encoded, slabs, decoded.data)

    assert encoded.nbytes <= codec.encoded_max(slabs)
    assert (decoded == raw).all()


@pytest.mark.parametrize("transport", ["tcp", "ucx", "shm"])
@pytest.mark.parametrize("name", [AUTO, *CODECS])
def test_whatever_codec_is_configured_values_and_scales_land_byte_for_byte(name: str, transport: str) -> None:
    async def test() -> None:
        async with asyncio.timeout(60):
            source, target = FakeBlockStore(6, BYTES), FakeBlockStore(6, BYTES)
            for block in range(6):
                source.fill(block, block + 1)
            sender, receiver = (
                await endpoint("a", source, transport, name),
                await endpoint("b", target, transport, name),
            )
            try:
                landing = receiver.grant([4, 0, 2], 0)
                push = await sender.open_push(landing.ticket)
                push.announce(0, [1, 5, 3])
                await asyncio.gather(push.finish(), landing.landed())
            finally:
                await sender.close()
                await receiver.close()

            assert landing.ticket.codec == codec_for(BYTES, name)
            assert [target.block(block) for block in (4, 0, 2)] == [source.block(block) for block in (1, 5, 3)]

    asyncio.run(test())


@pytest.mark.parametrize("name", [name for name in CODECS if is_lossy(name)])
def test_a_sender_that_would_quantise_values_with_scales_is_refused(name: str) -> None:
    async def test() -> None:
        async with asyncio.timeout(60):
            store = FakeBlockStore(6, BYTES)
            receiver, sender = await endpoint("b", store, "tcp", name), await endpoint("a", store, "tcp", name)
            try:
                landing = receiver.grant([0], 0)
                forged = type(landing.ticket)()
                forged.CopyFrom(landing.ticket)
                forged.codec = name
                with pytest.raises(TransferError, match=f"codec '{name}' for a ticket that asks for 'raw'"):
                    await sender.open_push(forged)
                with pytest.raises(TransferError, match="codec"):
                    await landing.landed()
                await landing.abort("refused")
            finally:
                await sender.close()
                await receiver.close()

    asyncio.run(test())


def test_a_pool_of_values_with_scales_and_one_without_exchange_nothing_and_say_why() -> None:
    async def test() -> None:
        async with asyncio.timeout(60):
            sender = await endpoint("a", FakeBlockStore(6, HALVES), "tcp", "int8")
            receiver = await endpoint("b", FakeBlockStore(6, BYTES), "tcp", "int8")
            landing = receiver.grant([0], 0)
            try:
                with pytest.raises(MismatchError, match="dtype is 'float16' here and 'int8' there"):
                    await sender.open_push(landing.ticket)
                await landing.abort("refused")
            finally:
                await sender.close()
                await receiver.close()

    asyncio.run(test())


async def endpoint(worker_id: str, store: FakeBlockStore, transport: str, codec: str) -> Any:
    config = TransferConfig.model_validate({"transport": transport, "codec": codec})
    return await TransferEndpoint.start(worker_id, "127.0.0.1", store, config)
