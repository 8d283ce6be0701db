"""What stands before every call to one of our servers: who calls, whether its bytes are a message, how it may fail.

A call that is refused, and one whose message cannot be read, ends in an error of ours: nobody writes a traceback about
what a client did.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from common.errors import BatonError, InvalidRequestError
from common.rich_status import path_in
from common.status import abort_rpc

Admit = Callable[[str, Mapping[str, str]], Awaitable[None]]
"""Called with a call's full method name and its metadata, in the call's own task; raises a BatonError to refuse it."""


class _Malformed:
    """Stands for a message that could not be read."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps the calls of one server. All values are Any: gRPC's handlers are untyped."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit
        self._guarded: dict[str, Any] = {}
        """By method; of those that there are."""
        self._calls = set[asyncio.Task[Any]]()
        """Those that run."""
        self._end: BatonError | None = None
        """Why calls are cancelled that their clients still want."""

    async def end_calls(self, error: BatonError, wait_s: float) -> None:
        """Give the calls that run `wait_s`, and end the rest with `error`. Returns when no call is left."""
        if self._calls and wait_s > 0:
            await asyncio.wait(self._calls, timeout=wait_s)
        self._end = error
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler behind the guard, or one that refuses the call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        details: Any = handler_call_details  # the stubs lack its fields
        metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        try:
            await self._admit(details.method, metadata)
        except BatonError as error:
            return _refusing(error)
        guarded = self._guarded.get(details.method)
        if guarded is None:
            guarded = self._guarded[details.method] = self._wrapped(handler)
        return guarded

    def _wrapped(self, handler: Any) -> Any:
        read = None if handler.request_deserializer is None else _tolerant(handler.request_deserializer)
        check = _checked_all if handler.request_streaming else _checked
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                make, serve = grpc.unary_unary_rpc_method_handler, handler.unary_unary
            case False, True:
                make, serve = grpc.unary_stream_rpc_method_handler, handler.unary_stream
            case True, False:
                make, serve = grpc.stream_unary_rpc_method_handler, handler.stream_unary
            case _:
                make, serve = grpc.stream_stream_rpc_method_handler, handler.stream_stream

        async def guarded(request: Any, context: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None, "gRPC serves each call in a task of its own"
            self._calls.add(task)
            try:
                result = serve(check(request), context)
                if not hasattr(result, "__aiter__"):
                    return await result
                async with aclosing(result):
                    async for response in result:
                        await context.write(response)
            except asyncio.CancelledError:
                if self._end is None:
                    raise  # by its client
                await abort_rpc(context, self._end)
            except BatonError as error:
                await abort_rpc(context, error, path_in(request) if isinstance(request, Message) else str)
            finally:
                self._calls.discard(task)
            return None

        return make(guarded, read, handler.response_serializer)


def _refusing(error: BatonError) -> Any:
    """Return a handler that refuses a call of any kind. As one of streams it takes no message in: those are large."""

    async def refuse(_: Any, context: Any) -> None:
        await abort_rpc(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read_or_mark(data: bytes) -> Any:
        try:
            return read(data)
        except (DecodeError, UnicodeDecodeError) as error:
            return _Malformed(str(error))

    return read_or_mark


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidRequestError(f"the request is no valid message (text must be UTF-8): {request.reason}")
    return request


async def _checked_all(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
