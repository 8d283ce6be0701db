"""While a large message is read, other calls go on, and callers take turns; a stream's messages keep their order."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import InvalidRequestError
from common.fair_thread import FairThread
from common.rpc import bind, make_server
from common.rpc_guard import Guard
from common.status import typed_rpc_errors

LIMIT_S = 10.0
LARGE = b"x" * 100_000
"""Read as a message it has 50,000 fields."""
FIELDS_MAX = 60_000
WHOSE = ContextVar("WHOSE", default="")


@asynccontextmanager
async def served(begun: threading.Event, gate: threading.Event) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a call that says how much it got, of a message that is read when the gate opens if it is large."""

    def read(data: bytes) -> int:
        if len(data) == len(LARGE):
            begun.set()
            assert gate.wait(LIMIT_S)
        return len(data)

    async def one(request: int, _: Any) -> bytes:
        return b"%d" % request

    async def several(requests: AsyncIterator[int], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield b"%d" % request

    async def admit(_: str, metadata: Mapping[str, str]) -> None:
        WHOSE.set(metadata.get("whose", ""))

    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(one, read),
        "Several": grpc.stream_stream_rpc_method_handler(several, read),
    }
    thread = FairThread("test", WHOSE.get)
    server = make_server(Guard(admit, fields_max=FIELDS_MAX, thread=thread))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop(None)
        thread.close()


def test_calls_go_on_while_a_large_message_is_read() -> None:
    begun, gate = threading.Event(), threading.Event()

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S), served(begun, gate) as channel:
            one: Any = channel.unary_unary("/test/One", None, None)
            large = asyncio.ensure_future(one(LARGE))
            assert await asyncio.to_thread(begun.wait, LIMIT_S)

            assert await one(b"small") == b"5"

            gate.set()
            assert await large == b"100000"

    asyncio.run(scenario())


def test_a_stream_keeps_its_order() -> None:
    begun, gate = threading.Event(), threading.Event()

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S), served(begun, gate) as channel:
            several: Any = channel.stream_stream("/test/Several", None, None)
            call = several(iter([b"1", LARGE, b"333"]))
            answers = [await call.read()]
            gate.set()
            answers += [await call.read(), await call.read()]

            assert answers == [b"1", b"100000", b"3"]

    asyncio.run(scenario())


def test_callers_take_turns_at_having_large_messages_read() -> None:
    begun, gate = threading.Event(), threading.Event()
    answered = list[str]()

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S), served(begun, gate) as channel:
            one: Any = channel.unary_unary("/test/One", None, None)

            async def ask(whose: str, number: int) -> None:
                await one(b"x" * (len(LARGE) + number), metadata=(("whose", whose),))
                answered.append(whose)

            asking = [asyncio.create_task(ask("a", 0))]
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
            asking += [asyncio.create_task(ask("a", number)) for number in (1, 2)]
            assert await one(b"small") == b"5"  # what was sent before it has arrived
            asking.append(asyncio.create_task(ask("b", 3)))
            assert await one(b"small") == b"5"
            gate.set()
            await asyncio.gather(*asking)

            assert answered == ["a", "a", "b", "a"]

    asyncio.run(scenario())


def test_a_large_message_of_many_tiny_fields_is_refused_unread() -> None:
    begun, gate = threading.Event(), threading.Event()
    gate.set()

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S), served(begun, gate) as channel:
            one: Any = channel.unary_unary("/test/One", None, None)
            with pytest.raises(InvalidRequestError, match="more than 60000 fields"), typed_rpc_errors():
                await one(b"\x0b" * len(LARGE))

            assert not begun.is_set()

    asyncio.run(scenario())
