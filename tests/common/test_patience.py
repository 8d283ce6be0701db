"""A wait that is too long is told once; waits that end in time are not, however many there are."""

import asyncio

from common.patience import Patience

_SHORT_S, _LONG_S = 0.01, 3600.0


def test_a_wait_that_does_not_end_is_told() -> None:
    async def scenario() -> None:
        late = asyncio.Event()
        patience = Patience(_SHORT_S, late.set)
        patience.begin()
        await asyncio.wait_for(late.wait(), 30)

    asyncio.run(scenario())


def test_a_wait_is_as_old_as_its_own_beginning() -> None:
    async def scenario() -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        patience = Patience(0.2, told.set)
        patience.begin()
        await asyncio.sleep(0.1)
        patience.end()
        patience.begin()
        begin = loop.time()
        await asyncio.wait_for(told.wait(), 30)
        assert loop.time() - begin >= 0.19

    asyncio.run(scenario())


def test_a_wait_that_has_ended_is_not_told() -> None:
    async def scenario() -> None:
        told = list[str]()
        ended = Patience(_SHORT_S, lambda: told.append("ended"))
        ended.begin()
        ended.end()
        closed = Patience(_SHORT_S, lambda: told.append("closed"))
        closed.begin()
        closed.close()
        after = asyncio.Event()
        last = Patience(_SHORT_S * 3, after.set)
        last.begin()
        await asyncio.wait_for(after.wait(), 30)
        assert told == []

    asyncio.run(scenario())


def test_another_wait_can_follow_a_late_one() -> None:
    async def scenario() -> None:
        late = asyncio.Event()
        patience = Patience(_SHORT_S, late.set)
        for _ in range(2):
            late.clear()
            patience.begin()
            await asyncio.wait_for(late.wait(), 30)

    asyncio.run(scenario())
