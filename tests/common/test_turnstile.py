"""One holder has so many turns at once, others have their own, and a turn that is given up goes to the next."""

import asyncio

from common.turnstile import Turnstile

LIMIT_S = 10.0


def test_those_beyond_the_most_wait_in_order_and_other_holders_do_not() -> None:
    async def scenario() -> None:
        turnstile, order = Turnstile(1), list[str]()

        async def pass_through(name: str) -> None:
            async with turnstile.turn("a"):
                order.append(name)

        async with asyncio.timeout(LIMIT_S):
            await turnstile.enter("a")
            waiting = [asyncio.create_task(pass_through(name)) for name in ("first", "second", "third")]
            await asyncio.sleep(0)
            async with turnstile.turn("b"):
                assert order == []
            waiting[1].cancel()
            turnstile.leave("a")
            await asyncio.gather(*waiting, return_exceptions=True)

        assert order == ["first", "third"]
        async with turnstile.turn("a"):
            pass

    asyncio.run(scenario())


def test_a_turn_that_comes_as_it_is_given_up_is_not_lost() -> None:
    async def scenario() -> None:
        turnstile = Turnstile(1)
        async with asyncio.timeout(LIMIT_S):
            await turnstile.enter("a")
            waiting = asyncio.create_task(turnstile.enter("a"))
            await asyncio.sleep(0)
            turnstile.leave("a")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

            await turnstile.enter("a")

    asyncio.run(scenario())
