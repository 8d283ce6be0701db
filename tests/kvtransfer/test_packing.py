"""Pieces of many small runs travel as one message: the same bytes and checksum, and a stop never leaves a writer."""

import asyncio
import random

import pytest

from common.config import TransferConfig
from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.memory import SPARE_MAX, Memory, Spare
from kvtransfer.packing import pack, unpack
from kvtransfer.pieces import PIECE_BYTES_MAX, Run, Runs

NUM_BLOCKS = 4000


def shuffled(count: int) -> list[int]:
    return random.Random(count).sample(range(NUM_BLOCKS), count)


def test_what_is_packed_is_unpacked_where_it_belongs_with_the_same_checksum() -> None:
    source, target = bytearray(random.Random(1).randbytes(100_000)), bytearray(100_000)
    runs = Runs.of([Run(90_000, 10, 3000), Run(5, 50_000, 7), Run(1000, 20_000, 9000)])
    message = memoryview(bytearray(runs.num_bytes))

    sent = pack(Memory(memoryview(source)), runs, message, True, Stop())
    received = unpack(message, Memory(memoryview(target)), runs, True, Stop())

    assert sent == received
    expected = bytearray(100_000)
    for run in runs:
        expected[run.target : run.target + run.num_bytes] = source[run.source : run.source + run.num_bytes]
    assert target == expected
    assert unpack(message, Memory(memoryview(target)), runs, False, Stop()) is None


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_thousands_of_scattered_small_blocks_arrive_in_their_places(transport: str) -> None:
    async def main() -> None:
        source, target = FakeBlockStore(NUM_BLOCKS), FakeBlockStore(NUM_BLOCKS)
        blocks, landing_blocks = shuffled(3000), shuffled(3000)[::-1]
        source.buffer[:] = random.Random(3).randbytes(len(source.buffer))
        config = TransferConfig.model_validate({"transport": transport, "codec": "raw"})
        sender = await TransferEndpoint.start("sender", "127.0.0.1", source, config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target, config)
        async with asyncio.timeout(60):
            for _ in range(2):  # the second time in buffers that were used before
                landing = receiver.grant(landing_blocks, 0)
                push = await sender.open_push(landing.ticket)
                push.announce(0, blocks)
                await asyncio.gather(push.finish(), landing.landed())
                assert all(
                    target.block(there) == source.block(here)
                    for here, there in zip(blocks, landing_blocks, strict=True)
                )
                blocks.reverse()
            await sender.close()
            await receiver.close()

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_a_landing_that_was_given_up_amid_small_blocks_is_not_written_to_any_more(transport: str) -> None:
    async def main() -> None:
        source, target = FakeBlockStore(NUM_BLOCKS), FakeBlockStore(NUM_BLOCKS)
        source.buffer[:] = b"\x01" * len(source.buffer)
        config = TransferConfig.model_validate({"transport": transport, "codec": "raw"})
        sender = await TransferEndpoint.start("sender", "127.0.0.1", source, config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target, config)
        async with asyncio.timeout(60):
            for turns in range(8):
                landing = receiver.grant(shuffled(3000), 0)
                push = await sender.open_push(landing.ticket)
                push.announce(0, shuffled(3000))
                for _ in range(turns * 4):
                    await asyncio.sleep(0)
                await landing.abort("not wanted")
                target.buffer[:] = bytes(len(target.buffer))
                with pytest.raises(TransferError):
                    await push.finish()
                await push.abort("as well")
                assert not any(target.buffer)
            await sender.close()
            await receiver.close()

    asyncio.run(main())


def test_buffers_are_used_again_and_few_are_kept() -> None:
    spare = Spare()
    taken = [spare.take(100 + i) for i in range(2 * SPARE_MAX)]
    assert len({id(buffer.obj) for buffer in taken}) == 2 * SPARE_MAX
    whole = {id(buffer.obj) for buffer in taken}

    for buffer in taken:
        spare.give(buffer)
    spare.give(spare.take(PIECE_BYTES_MAX + 1))
    again = [spare.take(PIECE_BYTES_MAX) for _ in range(SPARE_MAX)]

    assert {id(buffer.obj) for buffer in again} <= whole
    assert id(spare.take(1).obj) not in {id(buffer.obj) for buffer in again}


def test_the_layout_of_these_tests_has_small_blocks() -> None:
    assert Runs.of([Run(0, 0, SMALL_LAYOUT.block_bytes)] * 2).are_packed
