"""Who gets no push from a ticket may reuse its source at once: nothing of this process reads it, now or later."""

import asyncio

from tests.kvtransfer.faulty import FaultyPair, faulty_pair

LIMIT_S = 20


async def is_cancelled_after(pair: FaultyPair, yields: int) -> bool:
    """Open a push with a block that is ready, and cancel that at some moment; return whether it came in time."""
    landing = pair.receiver.grant([3], 0)
    opening = asyncio.create_task(pair.sender.open_push(landing.ticket, [8]))
    for _ in range(yields):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    if not opening.cancelled():
        aborting = asyncio.create_task(opening.result().abort("over"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert aborting.done() == (pair.wire.num_unread == 0)
        pair.wire.flow()
        await aborting
    for _ in range(10):
        assert pair.wire.num_unread == 0
        await asyncio.sleep(0)
    await landing.abort("over")
    return opening.cancelled()


def test_an_open_that_is_cancelled_at_any_moment_leaves_nobody_who_reads_the_source() -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), faulty_pair(checksum=False) as pair:
            landing = pair.receiver.grant([7], 0)
            push = await pair.sender.open_push(landing.ticket, [7])  # so that there is a connection
            await asyncio.gather(push.finish(), landing.landed())
            pair.wire.is_lazy = True

            yields = 0
            while await is_cancelled_after(pair, yields):
                yields += 1

            assert yields > 4  # Open and its answer crossed in between
            assert pair.sender.num_active == pair.receiver.num_active == 0

    asyncio.run(test())
