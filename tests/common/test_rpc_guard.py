"""While a large message is read, other calls go on; messages are read in the order in which a stream brings them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from common.rpc import bind, make_server
from common.rpc_guard import Guard

LIMIT_S = 10.0
LARGE = b"x" * 100_000


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

    async def nobody(*_: object) -> None:
        pass

    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(one, read),
        "Several": grpc.stream_stream_rpc_method_handler(several, read),
    }
    server = make_server(Guard(nobody))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop(None)


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
