"""The choices of one client's request: each is a request of its own to the cluster, all are read as one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from baton_pb.v1 import inference_pb2
from cluster.gateway.progress import Delta
from common.errors import InvalidRequestError

CHOICES_MAX = 16
"""Most choices of one prompt."""

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
Generate = Callable[[inference_pb2.GenerateRequest, str, float], AsyncGenerator[Delta, None]]
"""`Generator.generate`."""


def choices_of(
    generate: Generate, messages: Sequence[inference_pb2.GenerateRequest], request_id: str, timeout_s: float
) -> Streams:
    """Return the choices of one or several prompts; nothing runs yet.

    Args:
        generate: serves one choice.
        messages: one for each prompt, with `n`; choice i of a prompt has the seed `seed + i`.
        request_id: theirs is `request_id.k`, counted over all prompts, if there are several of them.
        timeout_s: see `generate`.

    Returns:
        The choices in order, those of one prompt as neighbours.

    Raises:
        InvalidRequestError: n is too large.
    """
    asked = [(message, choice) for message in messages for choice in range(_num_choices(message))]
    if len(asked) == 1:
        return [generate(messages[0], request_id, timeout_s)]
    return [
        generate(_with_seed_of(message, choice), f"{request_id}.{number}", timeout_s)
        for number, (message, choice) in enumerate(asked)
    ]


def _num_choices(message: inference_pb2.GenerateRequest) -> int:
    if message.n > CHOICES_MAX:
        raise InvalidRequestError(f"n must be at most {CHOICES_MAX}, got {message.n}")
    return message.n or 1


def _with_seed_of(message: inference_pb2.GenerateRequest, choice: int) -> inference_pb2.GenerateRequest:
    if not choice or not message.sampling.HasField("seed"):
        return message
    made = inference_pb2.GenerateRequest()
    made.CopyFrom(message)
    made.sampling.seed = (message.sampling.seed + choice) % 2**64
    return made


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
