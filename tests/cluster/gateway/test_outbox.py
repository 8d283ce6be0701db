"""An outbox keeps order and its bound, and ends."""

import asyncio

from cluster.gateway.outbox import Outbox


def test_items_come_in_order_and_one_too_many_is_refused() -> None:
    async def scenario() -> None:
        outbox = Outbox[int](2, 1)

        assert outbox.put(2)
        assert not outbox.put(3)
        assert [await anext(outbox), await anext(outbox)] == [1, 2]

    asyncio.run(scenario())


def test_closing_ends_whoever_waits_and_drops_the_rest() -> None:
    async def scenario() -> None:
        outbox = Outbox[int](2)

        async def read() -> list[int]:
            return [item async for item in outbox]

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        outbox.close()

        assert await asyncio.wait_for(reader, 5) == []
        assert outbox.put(1)
        assert [item async for item in outbox] == []

    asyncio.run(scenario())
