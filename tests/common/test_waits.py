"""A wait that is too long is told once; waits that end in time are not, however many there are."""

import asyncio
from functools import partial

from common.waits import Waits

SHORT_S, LONG_S = 0.01, 3600.0
LIMIT_S = 30.0


def test_a_wait_that_does_not_end_is_told() -> None:
    async def scenario() -> None:
        late = asyncio.Event()
        Waits(SHORT_S).begin(late.set)
        await asyncio.wait_for(late.wait(), LIMIT_S)

    asyncio.run(scenario())


def test_a_wait_is_as_old_as_its_own_beginning() -> None:
    async def scenario() -> None:
        loop, waits = asyncio.get_running_loop(), Waits(0.2)
        told, first = asyncio.Event(), asyncio.Event()
        waits.begin(first.set)
        waits.begin(told.set)
        await asyncio.sleep(0.1)
        waits.end(told.set)
        waits.begin(told.set)
        begin = loop.time()
        await asyncio.wait_for(told.wait(), LIMIT_S)
        assert first.is_set()
        assert loop.time() - begin >= 0.19

    asyncio.run(scenario())


def test_a_wait_that_has_ended_is_not_told() -> None:
    async def scenario() -> None:
        told, waits, after = list[str](), Waits(SHORT_S), asyncio.Event()
        ended = partial(told.append, "ended")
        waits.begin(ended)
        waits.begin(after.set)
        waits.end(ended)
        waits.end(ended)
        await asyncio.wait_for(after.wait(), LIMIT_S)
        assert told == []

    asyncio.run(scenario())


def test_another_wait_can_follow_a_late_one() -> None:
    async def scenario() -> None:
        late, waits = asyncio.Event(), Waits(SHORT_S)
        for _ in range(2):
            late.clear()
            waits.begin(late.set)
            await asyncio.wait_for(late.wait(), LIMIT_S)

    asyncio.run(scenario())


def test_waits_have_one_timer_together() -> None:
    async def scenario() -> None:
        loop, waits = asyncio.get_running_loop(), Waits(LONG_S)
        for number in range(100):
            wait = partial(print, number)
            waits.begin(wait)
            waits.end(wait)
        assert len([timer for timer in loop._scheduled if not timer.cancelled()]) == 1  # type: ignore[attr-defined]  # asyncio has no other way to ask

    asyncio.run(scenario())
