"""Two processes: bytes cross between them, and the death of either is a typed error at the other, all blocks back."""

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton_pb.v1 import transfer_pb2
from common.config import TransferConfig
from common.errors import TransferError, WorkerLostError
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from tests.kvtransfer.peer_process import peer

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.slow

LAYOUT = SMALL_LAYOUT._replace(num_layers=16, block_tokens=64, head_dim=128)  # 2 MiB a block
NUM_BLOCKS = 24
MARK = 0xEE

NUM_KILLS = 5
LOST_WITHIN_S = 1.0
"""After a kill: long before any lease or missed ping."""

TRANSPORTS = ["shm", "ucx", "tcp", "tcp lossless"]
"""A codec in the name: and sealed."""


@asynccontextmanager
async def own(transport: str) -> AsyncIterator[tuple[TransferEndpoint, FakeBlockStore]]:
    store = FakeBlockStore(NUM_BLOCKS, LAYOUT)
    name, _, codec = transport.partition(" ")
    config = TransferConfig.model_validate({"transport": name, "codec": codec or "raw", "sealed": bool(codec)})
    endpoint = await TransferEndpoint.start("own", "127.0.0.1", store, config)
    try:
        yield endpoint, store
    finally:
        await endpoint.close()
    assert endpoint.num_active == 0


def num_pieces(endpoint: TransferEndpoint) -> int:
    return sum(entry.pieces for entry in endpoint.stats())


async def next_piece(endpoint: TransferEndpoint, before: int) -> None:
    """Return when one more than `before` has been acknowledged: the transfer is in full flow."""
    while num_pieces(endpoint) == before:  # noqa: ASYNC110  (pieces raise no event)
        await asyncio.sleep(0)


def mark(store: FakeBlockStore) -> None:
    for block in range(NUM_BLOCKS):
        store.write(block, bytes([MARK]) * LAYOUT.block_bytes)


def is_marked(store: FakeBlockStore) -> bool:
    return all(store.block(block) == bytes([MARK]) * LAYOUT.block_bytes for block in range(NUM_BLOCKS))


def any_bytes() -> list[int]:
    """Return places in the bytes of a whole pool, other ones each time."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    places = [draw.randrange(NUM_BLOCKS * LAYOUT.block_bytes) for _ in range(NUM_KILLS)]
    logger.warning("seed %d: kills at bytes %s", seed, places)
    return places


def num_acknowledged(endpoint: TransferEndpoint) -> int:
    return sum(entry.bytes for entry in endpoint.stats())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_killed_at_any_byte_is_lost_within_a_second_and_all_blocks_are_back(transport: str) -> None:
    async def test() -> None:
        async with own(transport) as (endpoint, store):
            for place in any_bytes():
                async with asyncio.timeout(60), peer(transport) as child:
                    mark(store)
                    landing = endpoint.grant(list(range(NUM_BLOCKS)), 0)
                    await child.tell(f"push {landing.ticket.SerializeToString().hex()}")
                    while store.buffer[place] == MARK:  # noqa: ASYNC110  (bytes raise no event)
                        await asyncio.sleep(0)

                    child.process.send_signal(signal.SIGKILL)

                    async with asyncio.timeout(LOST_WITHIN_S):
                        with pytest.raises(TransferError, match="lost"):
                            await landing.landed()
                        await landing.abort("lost")
                    mark(store)
                    assert endpoint.num_active == 0
                assert is_marked(store)

    asyncio.run(test())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_killed_at_any_byte_is_lost_within_a_second(transport: str) -> None:
    async def test() -> None:
        async with own(transport) as (endpoint, _):
            for place in any_bytes():
                async with asyncio.timeout(60), peer(transport) as child:
                    ticket = transfer_pb2.Ticket.FromString(bytes.fromhex(await child.ask(f"grant {NUM_BLOCKS}")))
                    push = await endpoint.open_push(ticket)
                    before = num_acknowledged(endpoint)
                    for block in range(NUM_BLOCKS):
                        push.announce(block, [block], range(8))
                        push.announce(block, [block], range(8, 16))
                    while num_acknowledged(endpoint) - before < place:  # noqa: ASYNC110  (pieces raise no event)
                        await asyncio.sleep(0)

                    child.process.send_signal(signal.SIGKILL)

                    async with asyncio.timeout(LOST_WITHIN_S):
                        with pytest.raises(WorkerLostError, match="lost"):
                            await push.finish()
                        await push.abort("lost")
                    assert endpoint.num_active == 0

    asyncio.run(test())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_cross_both_ways_and_a_receiver_killed_in_full_flow_is_lost_at_once(transport: str) -> None:
    async def test() -> None:
        async with asyncio.timeout(60), peer(transport) as child, own(transport) as (endpoint, store):
            landing = endpoint.grant(list(range(10)), 0)
            assert await child.ask(f"push {landing.ticket.SerializeToString().hex()}") == "announced"
            assert await child.ask("finish") == str(10 * LAYOUT.block_bytes)
            assert (await landing.landed()).transport == transport.partition(" ")[0]
            assert all(set(store.block(block)) == {block + 1} for block in range(10))

            ticket = transfer_pb2.Ticket.FromString(bytes.fromhex(await child.ask("grant 10")))
            push = await endpoint.open_push(ticket)
            for block in reversed(range(10)):
                push.announce(block, [block], range(8, 16))
                push.announce(block, [block], range(8))
            await push.finish()
            assert await child.ask("landed 10") == "True"

            ticket = transfer_pb2.Ticket.FromString(bytes.fromhex(await child.ask(f"grant {NUM_BLOCKS}")))
            push = await endpoint.open_push(ticket)
            before = num_pieces(endpoint)
            push.announce(0, list(range(NUM_BLOCKS)))
            await next_piece(endpoint, before)

            child.process.send_signal(signal.SIGKILL)

            async with asyncio.timeout(LOST_WITHIN_S):
                with pytest.raises(WorkerLostError, match="lost"):
                    await push.finish()
                await push.abort("lost")
            assert endpoint.num_active == 0
            with pytest.raises(WorkerLostError):
                await endpoint.open_push(ticket)

    asyncio.run(test())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_frozen_or_killed_in_full_flow_cannot_write_after_the_abort(transport: str) -> None:
    async def test() -> None:
        async with asyncio.timeout(60), peer(transport) as child, own(transport) as (endpoint, store):
            frozen, before = endpoint.grant(list(range(NUM_BLOCKS)), 0), num_pieces(endpoint)
            assert await child.ask(f"push {frozen.ticket.SerializeToString().hex()}") == "announced"
            await next_piece(endpoint, before)

            child.process.send_signal(signal.SIGSTOP)
            await frozen.abort("it hangs")
            mark(store)
            child.process.send_signal(signal.SIGCONT)

            with pytest.raises(TransferError):
                await frozen.landed()
            await asyncio.sleep(0.2)
            assert is_marked(store)

            killed, before = endpoint.grant(list(range(NUM_BLOCKS)), 0), num_pieces(endpoint)
            await child.tell(f"push {killed.ticket.SerializeToString().hex()}")
            await next_piece(endpoint, before)  # the sender is served again

            child.process.send_signal(signal.SIGKILL)

            async with asyncio.timeout(LOST_WITHIN_S):
                with pytest.raises(TransferError, match="lost"):
                    await killed.landed()
                await killed.abort("lost")
            mark(store)
            await asyncio.sleep(0.1)
            assert is_marked(store)
            assert endpoint.num_active == 0

    asyncio.run(test())
