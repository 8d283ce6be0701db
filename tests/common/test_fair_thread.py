"""Work of one caller waits for one piece of another one's, however much that one has brought."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context

import pytest

from common.fair_thread import FairThread
from tests.cluster.fake_cluster import LIMIT_S, run

WHOSE = ContextVar("WHOSE", default="")


def asked_by(whose: str, work: Callable[[], Awaitable[object]]) -> "asyncio.Task[object]":
    """Begin work in a task of somebody's."""

    async def asked() -> object:
        return await work()

    context = copy_context()
    context.run(WHOSE.set, whose)
    return asyncio.get_running_loop().create_task(asked(), context=context)


@contextmanager
def fair_thread() -> Iterator[FairThread]:
    thread = FairThread("test", WHOSE.get)
    try:
        yield thread
    finally:
        thread.close()


def test_callers_take_turns() -> None:
    done = list[str]()
    gate = threading.Event()

    async def scenario() -> None:
        with fair_thread() as thread:
            tasks = [asked_by("b", lambda: thread.run(lambda: gate.wait(LIMIT_S)))]
            tasks += [asked_by("b", lambda name=name: thread.run(lambda: done.append(name))) for name in ("b1", "b2")]  # type: ignore[misc]  # mypy cannot infer a lambda's default
            await asyncio.sleep(0)
            tasks += [asked_by("a", lambda name=name: thread.run(lambda: done.append(name))) for name in ("a1", "a2")]  # type: ignore[misc]  # as above
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*tasks)

            assert done == ["b1", "a1", "b2", "a2"]

    run(scenario())


def test_an_error_is_told_and_what_was_given_up_does_not_run() -> None:
    done = list[str]()
    gate = threading.Event()

    def fail() -> None:
        raise ValueError("wrong")

    async def scenario() -> None:
        with fair_thread() as thread:
            first = asked_by("a", lambda: thread.run(lambda: gate.wait(LIMIT_S)))
            given_up = asked_by("a", lambda: thread.run(lambda: done.append("given up")))
            failing = asked_by("b", lambda: thread.run(fail))
            last = asked_by("a", lambda: thread.run(lambda: done.append("last")))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.sleep(0)
            gate.set()

            with pytest.raises(ValueError, match="wrong"):
                await failing
            await asyncio.gather(first, last)
            assert done == ["last"]

    run(scenario())


def test_between_pieces_that_hold_the_loop_up_it_goes_on_for_as_long_as_they_took() -> None:
    done = list[str]()
    never = threading.Event()

    async def scenario() -> None:
        def others() -> None:
            asyncio.get_running_loop().call_later(0.02, done.append, "others")

        with fair_thread() as thread:
            first = asyncio.create_task(thread.run(lambda: never.wait(0.1), holds_loop_up=True))
            first.add_done_callback(lambda _: others())
            await asyncio.gather(first, thread.run(lambda: done.append("next"), holds_loop_up=True))

            assert done == ["others", "next"]

    run(scenario())
