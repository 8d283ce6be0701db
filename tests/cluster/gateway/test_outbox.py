"""An outbox keeps order and its bound, sends together what has come together, and ends."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.outbox import Outbox


def outbox_of(size_max: int) -> Outbox[list[int]]:
    return Outbox[list[int]](size_max, [0], _joined)


def _joined(lists: Sequence[list[int]]) -> list[int]:
    return [one for each in lists for one in each]


def test_the_first_item_goes_alone_and_one_too_many_is_refused() -> None:
    async def scenario() -> None:
        outbox = outbox_of(2)

        assert outbox.put([1])
        assert outbox.put([2])
        assert not outbox.put([3])
        assert [await anext(outbox), await anext(outbox)] == [[0], [1, 2]]

    asyncio.run(scenario())


@given(st.lists(st.one_of(st.integers(1, 9), st.none()), max_size=60))
def test_whenever_it_is_read_all_items_come_once_and_in_order(steps: list[int | None]) -> None:
    """A number: put so many; None: read one message."""

    async def scenario() -> None:
        outbox, count, read = outbox_of(1000), 0, list[int]()
        assert await anext(outbox) == [0]
        for step in [*steps, *([None] * 60)]:
            if step is None and len(read) < count:
                read += await anext(outbox)
            for _ in range(step or 0):
                count += 1
                assert outbox.put([count])

        assert read == list(range(1, count + 1))

    asyncio.run(scenario())


def test_closing_ends_whoever_waits_and_drops_the_rest() -> None:
    async def scenario() -> None:
        outbox = outbox_of(2)

        async def read() -> list[list[int]]:
            return [item async for item in outbox]

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        outbox.close()

        assert await asyncio.wait_for(reader, 5) == [[0]]
        assert outbox.put([1])
        assert [item async for item in outbox] == []

    asyncio.run(scenario())
