"""The choices of one HTTP request: each is a request of its own to the cluster, all are read as one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from cluster.gateway.progress import Delta

_WAITING_MAX = 8
"""Deltas that wait for the client; a choice that is ahead by more waits itself, and its tokens add up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice gives next."""

    index: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class _Ended:
    error: BaseException | None


Streams = Sequence[AsyncGenerator[Delta, None]]


@asynccontextmanager
async def pieces_of(streams: Streams) -> AsyncIterator[AsyncIterator[Piece]]:
    """Read all choices. One that fails ends them all, with its error; leaving the block cancels what still runs."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            yield _alone(stream)
        return
    queue = asyncio.Queue[Piece | _Ended](_WAITING_MAX)
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        yield _together(queue, len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _alone(stream: AsyncGenerator[Delta, None]) -> AsyncIterator[Piece]:
    async for delta in stream:
        yield Piece(0, delta)


async def _together(queue: "asyncio.Queue[Piece | _Ended]", num_running: int) -> AsyncIterator[Piece]:
    while num_running:
        item = await queue.get()
        if isinstance(item, Piece):
            yield item
        elif item.error is not None:
            raise item.error
        else:
            num_running -= 1


async def _pump(index: int, stream: AsyncGenerator[Delta, None], queue: "asyncio.Queue[Piece | _Ended]") -> None:
    error: BaseException | None = None
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put(Piece(index, delta))
    except Exception as caught:  # the reader raises it
        error = caught
    await queue.put(_Ended(error))
