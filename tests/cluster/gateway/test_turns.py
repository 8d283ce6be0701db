"""A few streams go on in each pass of the loop, in the order in which they asked, and none is forgotten."""

import asyncio
from collections.abc import Callable

from cluster.gateway.turns import Turns


def test_a_few_go_in_each_pass_and_all_in_their_order() -> None:
    async def scenario() -> None:
        turns, order = Turns(3), list[int]()

        def stream(number: int) -> Callable[[], bool]:
            def go() -> bool:
                order.append(number)
                return True

            return go

        for number in range(10):
            turns.ask(stream(number))
        gone = [len(order)]
        for _ in range(4):
            await asyncio.sleep(0)
            gone.append(len(order))

        assert order == list(range(10))
        assert gone == [3, 6, 9, 10, 10]

    asyncio.run(scenario())


def test_one_alone_never_waits() -> None:
    async def scenario() -> None:
        turns, went = Turns(1), 0

        def go() -> bool:
            nonlocal went
            went += 1
            return True

        for number in range(5):
            turns.ask(go)
            assert went == number + 1
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_one_that_does_not_want_its_turn_any_more_costs_the_others_nothing() -> None:
    async def scenario() -> None:
        turns, went = Turns(1), list[int]()

        def asker(number: int, wants: bool) -> Callable[[], bool]:
            def go() -> bool:
                went.append(number)
                return wants

            return go

        for number, wants in enumerate([True, False, False, True]):
            turns.ask(asker(number, wants))
        await asyncio.sleep(0)

        assert went == [0, 1, 2, 3]

    asyncio.run(scenario())
