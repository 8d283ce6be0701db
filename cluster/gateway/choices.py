"""The choices of one client's request: each is a request of its own to the cluster, all are read as one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Self

from baton_pb.v1 import inference_pb2
from cluster.gateway.progress import Delta
from common.errors import InvalidRequestError

CHOICES_MAX = 16
"""Most choices of one prompt."""

_COPIED_BYTES_MAX = 16 * 1024 * 1024
"""Of a message for its further choices, and of what the prompts of a batch share; all copies together."""

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
        InvalidRequestError: n is too large, by itself or for messages of this size.
    """
    asked = [(message, choice) for message in messages for choice in range(_num_choices(message))]
    if len(asked) == 1:
        return [generate(messages[0], request_id, timeout_s)]
    num_bytes = sum(message.ByteSize() for message, choice in asked if choice and message.sampling.HasField("seed"))
    if num_bytes > _COPIED_BYTES_MAX:
        raise InvalidRequestError(
            f"n must be less for prompts of this size: its choices make {num_bytes} bytes of copies, more than "
            f"{_COPIED_BYTES_MAX}"
        )
    return [
        generate(_with_seed_of(message, choice), one_id, timeout_s)
        for one_id, (message, choice) in zip(choice_ids(request_id, len(asked)), asked, strict=True)
    ]


def choice_ids(request_id: str, count: int) -> Sequence[str]:
    """Return the ids of a request's choices, by which router and workers know them."""
    return [request_id] if count == 1 else [choice_id(request_id, number) for number in range(count)]


def choice_id(request_id: str, number: int) -> str:
    """Return the id of one of a request's several choices."""
    return f"{request_id}.{number}"


def choices_of_call(
    generate: Generate, message: inference_pb2.GenerateRequest, request_id: str, timeout_s: float, choices_max: int
) -> Streams:
    """Return the choices of a message that may have a batch of prompts; nothing runs yet.

    Args:
        generate: serves one choice.
        message: from the client.
        request_id: as for `choices_of`.
        timeout_s: see `generate`.
        choices_max: of all prompts together.

    Raises:
        InvalidRequestError: no prompt in the batch, too many choices, or too much to copy. What a stream raises about a
            prompt of a batch names it by its path.
    """
    n, prompts = _num_choices(message), message.batch.prompts
    if message.WhichOneof("prompt") != "batch":
        check_count(n, choices_max)
        return choices_of(generate, [message], request_id, timeout_s)
    if not prompts:
        raise InvalidRequestError("batch.prompts must have at least 1 prompt, got 0")
    check_count(len(prompts) * n, choices_max)
    streams = choices_of(generate, _one_by_one(message), request_id, timeout_s)
    return [_naming(f"batch.prompts[{number // n}]", stream) for number, stream in enumerate(streams)]


def check_count(count: int, choices_max: int) -> None:
    """Refuse more choices than a call may have.

    Raises:
        InvalidRequestError: with both numbers.
    """
    if count > choices_max:
        raise InvalidRequestError(f"prompt must give at most {choices_max} choices, got {count}")


def _one_by_one(message: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateRequest]:
    """Return a message for each prompt of a batch."""
    shared = inference_pb2.GenerateRequest()
    shared.CopyFrom(message)
    shared.ClearField("batch")
    num_bytes, made = shared.ByteSize(), []
    if num_bytes * len(message.batch.prompts) > _COPIED_BYTES_MAX:
        raise InvalidRequestError(
            f"batch must have fewer prompts, or less beside them: {len(message.batch.prompts)} times {num_bytes} bytes "
            f"are more than {_COPIED_BYTES_MAX}"
        )
    for prompt in message.batch.prompts:
        one = inference_pb2.GenerateRequest()
        one.CopyFrom(shared)
        match prompt.WhichOneof("prompt"):
            case "text":
                one.text = prompt.text
            case "token_ids":
                one.token_ids.CopyFrom(prompt.token_ids)
            case None:
                pass  # whoever checks the message says so
        made.append(one)
    return made


async def _naming(prompt: str, stream: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Let a stream's errors about its prompt say which it is."""
    try:
        async with aclosing(stream):
            async for delta in stream:
                yield delta
    except InvalidRequestError as error:
        if error.field == "prompt":
            raise InvalidRequestError(prompt + error.message.removeprefix("prompt")) from error
        if error.field == "token_ids":
            raise InvalidRequestError(f"{prompt}.{error.message}") from error
        raise


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


def pieces_of(streams: Streams) -> AbstractAsyncContextManager[AsyncIterator[Piece]]:
    """Read all choices. One that fails ends them all, with its error; leaving the block cancels what still runs."""
    return _Alone(streams[0]) if len(streams) == 1 else _several(streams)


class _Alone:
    """The only choice. As a class, because nearly every request goes this way: generators for it would cost 20 us."""

    def __init__(self, stream: AsyncGenerator[Delta, None]) -> None:
        self._stream = stream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return Piece(0, await anext(self._stream))


@asynccontextmanager
async def _several(streams: Streams) -> AsyncIterator[AsyncIterator[Piece]]:
    queue = asyncio.Queue[Piece | _Ended](_WAITING_MAX)
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        yield _together(queue, len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
