"""Whatever a wire does to a byte: right bytes or a typed error at both ends, all blocks back, and then it works."""

import asyncio
import contextlib
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.config import TransferConfig
from common.errors import BatonError
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.interface import Landing
from tests.kvtransfer.faulty_wire import KINDS, Fault, FaultyWire, Kind, Stream, faulty_wire

LIMIT_S = 60.0
NUM_BLOCKS = 16
TARGETS, SOURCES = [3, 4, 11, 0], [8, 9, 2, 15]
# How many bytes pass in one transfer, a little more: a fault beyond the end does nothing, which has to work as well.
REACH: dict[Stream, int] = {"control": 900, "answers": 700, "data": 6400}


def stores() -> tuple[FakeBlockStore, FakeBlockStore]:
    source, target = FakeBlockStore(), FakeBlockStore()
    for block in range(NUM_BLOCKS):
        source.fill(block, block + 1)
    return source, target


async def attempt(sender: TransferEndpoint, receiver: TransferEndpoint) -> bool:
    """Make one transfer; return whether the receiver believes that it landed. Only typed errors come out of it."""
    landing = receiver.grant(TARGETS, 0)

    async def push() -> None:
        pushing = await sender.open_push(landing.ticket)
        try:
            for block, source in enumerate(SOURCES):
                pushing.announce(block, [source], range(2))
                await asyncio.sleep(0)
                pushing.announce(block, [source], range(2, 3))
            await pushing.finish()
        finally:
            await pushing.abort("over")

    landed, _ = await asyncio.gather(_has_landed(landing), _typed(push()))
    return landed


async def _has_landed(landing: Landing) -> bool:
    try:
        await landing.landed()
    except BatonError:
        return False
    finally:
        await landing.abort("over")
    return True


async def _typed(work: Any) -> None:
    with contextlib.suppress(BatonError):
        await work


async def survive(fault: Fault) -> FaultyWire:
    source, target = stores()
    config = TransferConfig(transport="tcp", codec="raw", lease_s=0.4, connect_timeout_s=0.4)
    sender = await TransferEndpoint.start("sender", "127.0.0.1", source, config)
    receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target, config)
    try:
        async with faulty_wire(receiver.address) as wire:
            wire.fault = fault
            before = bytes(target.buffer)

            if await attempt(sender, receiver):
                assert all(target.block(t) == source.block(s) for t, s in zip(TARGETS, SOURCES, strict=True))

            assert sender.num_active == receiver.num_active == 0
            others = set(range(NUM_BLOCKS)) - set(TARGETS)
            size = SMALL_LAYOUT.block_bytes
            assert all(target.block(b) == before[b * size : (b + 1) * size] for b in others)
            wire.fault = None
            while not await attempt(sender, receiver):  # the same two ends, without a restart
                pass
            assert all(target.block(t) == source.block(s) for t, s in zip(TARGETS, SOURCES, strict=True))
    finally:
        await sender.close()
        await receiver.close()
    return wire


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(stream=st.sampled_from(sorted(REACH)), share=st.floats(0, 1))
@example(stream="control", share=0.0)
@example(stream="answers", share=0.0)
@example(stream="data", share=0.5)
def test_a_fault_at_any_byte_ends_in_right_bytes_or_a_typed_error(kind: Kind, stream: Stream, share: float) -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S):
            await survive(Fault(kind, stream, int(share * REACH[stream])))

    asyncio.run(test())


def test_faults_reach_every_byte_of_a_transfer() -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S):
            wire = await survive(Fault("delay", "data", 0))
        assert all(0.5 * REACH[stream] < passed for stream, passed in wire.num_bytes.items())

    asyncio.run(test())


@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx"])
def test_a_thousand_transfers_at_once_of_which_a_fifth_is_given_up(transport: str) -> None:
    async def one(index: int, sender: TransferEndpoint, receiver: TransferEndpoint, rng: random.Random) -> bool:
        landing = receiver.grant([index], 0)
        given_up = rng.random() < 0.2
        push = await sender.open_push(landing.ticket)
        push.announce(0, [index % NUM_BLOCKS])
        if given_up:
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            await (landing if rng.random() < 0.5 else push).abort("given up")
        outcomes = await asyncio.gather(push.finish(), landing.landed(), return_exceptions=True)
        await push.abort("over")
        await landing.abort("over")
        assert all(isinstance(outcome, BatonError) or not isinstance(outcome, BaseException) for outcome in outcomes)
        assert given_up or not any(isinstance(outcome, BaseException) for outcome in outcomes)
        return not isinstance(outcomes[1], BaseException)

    async def test() -> None:
        source, target = FakeBlockStore(), FakeBlockStore(1000)
        for block in range(NUM_BLOCKS):
            source.fill(block, block + 1)
        config = TransferConfig.model_validate(
            {"transport": transport, "lease_s": LIMIT_S, "connect_timeout_s": LIMIT_S}
        )
        sender = await TransferEndpoint.start("sender", "127.0.0.1", source, config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target, config)
        rng = random.Random(3)
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                landed = await asyncio.gather(*(one(i, sender, receiver, rng) for i in range(1000)))
            assert 700 < sum(landed) < 900
            for block, is_landed in enumerate(landed):
                assert not is_landed or target.block(block) == source.block(block % NUM_BLOCKS)
            assert sender.num_active == receiver.num_active == 0
        finally:
            await sender.close()
            await receiver.close()

    asyncio.run(test())


@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx"])
def test_the_blocks_of_a_prompt_of_128k_tokens_arrive(transport: str) -> None:
    count = 131_072 // 16
    layout = SMALL_LAYOUT._replace(block_tokens=16, num_kv_heads=1, head_dim=1)  # 384 bytes a block

    async def test() -> None:
        source, target = FakeBlockStore(count, layout), FakeBlockStore(count, layout)
        source.buffer[:] = random.Random(1).randbytes(len(source.buffer))
        order = random.Random(2).sample(range(count), count)
        config = TransferConfig.model_validate({"transport": transport, "lease_s": LIMIT_S})
        sender = await TransferEndpoint.start("sender", "127.0.0.1", source, config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target, config)
        try:
            async with asyncio.timeout(LIMIT_S):
                landing = receiver.grant(order, 0)
                push = await sender.open_push(landing.ticket)
                for first in range(0, count, 512):  # a chunk of 8,192 tokens at a time
                    push.announce(first, range(first, min(first + 512, count)))
                await asyncio.gather(push.finish(), landing.landed())
            assert all(target.block(block) == source.block(place) for place, block in enumerate(order))
        finally:
            await sender.close()
            await receiver.close()

    asyncio.run(test())
