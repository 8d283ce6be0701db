"""A few streams go on in each pass of the loop, in the order in which they came, and none is forgotten."""

import asyncio

from cluster.gateway.turns import Turns


def test_a_few_go_in_each_pass_and_all_in_their_order() -> None:
    async def scenario() -> None:
        turns, passes, order = Turns(3), 0, list[tuple[int, int]]()

        async def stream(number: int) -> None:
            await turns.wait()
            order.append((passes, number))

        tasks = [asyncio.create_task(stream(number)) for number in range(10)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            passes += 1

        assert [number for _, number in order] == list(range(10))
        in_each = [sum(at == one for at, _ in order) for one in range(passes + 1)]
        assert max(in_each) == 3

    asyncio.run(scenario())


def test_one_alone_never_waits() -> None:
    async def scenario() -> None:
        turns = Turns(1)
        for _ in range(5):
            waiting = turns.wait()
            try:
                waiting.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waited")
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_one_that_is_cancelled_costs_the_others_nothing() -> None:
    async def scenario() -> None:
        turns = Turns(1)
        tasks = [asyncio.create_task(turns.wait()) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[2].cancel()

        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

        assert [type(one) for one in done] == [type(None), asyncio.CancelledError, asyncio.CancelledError, type(None)]

    asyncio.run(scenario())
