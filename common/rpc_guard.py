"""What stands before every call to one of our servers: who calls, whether its bytes are a message, how it may fail.

A call that is refused, and one whose message cannot be read, ends in an error of ours: nobody writes a traceback about
what a client did.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from common.errors import BatonError, DeadlineError, InvalidRequestError, OverloadedError
from common.fair_thread import FairThread
from common.rich_status import path_in
from common.status import abort_rpc
from common.turnstile import Turnstile
from common.waits import Waits
from common.wire_fields import has_more_fields

Admit = Callable[[str, Mapping[str, str]], Awaitable[None]]
"""Called with a call's full method name and its metadata, in the call's own task; raises a BatonError to refuse it."""

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
_RETRY_AFTER_S = 1.0
INLINE_BYTES_MAX = 64 * 1024
"""Of a message, or of an HTTP body: takes 10 ms at most to read. Larger ones are read on a thread."""

Read = Callable[[bytes], Any]


class Entered(NamedTuple):
    """What it means that a call was let in."""

    holder: str
    """Who has it."""
    leave: Callable[[], None]
    """To be called when the call has ended, whatever its client has read of it."""


class Sharing(NamedTuple):
    """How the calls of strangers are counted and bounded."""

    enter: Callable[[str], Entered]
    """Called with a call's peer as gRPC names it, in the call's own task; raises a BatonError to refuse it."""
    arrivals: Turnstile
    """For messages that arrive and are read: a client may send any part of one, and memory is held for it."""
    streams: Turnstile
    """For calls of many messages, each of which may come as slowly as it likes."""


class _Large:
    """Stands for a message that is not read yet."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class _Reading:
    """Reads one server's messages: large ones on a thread, one at a time, so that other calls go on between them."""

    def __init__(self, thread: FairThread, fields_max: int | None) -> None:
        self._thread = thread
        self._fields_max = fields_max

    async def message(self, given: Any, read: Read | None) -> Any:
        """Return a message.

        Raises:
            InvalidRequestError: it is none, or takes too long to read.
        """
        if isinstance(given, _Large) and read is not None:
            given = await self._thread.run(partial(self._read, given.data, read), holds_loop_up=True)
        if isinstance(given, _Malformed):
            raise InvalidRequestError(f"the request is no valid message (text must be UTF-8): {given.reason}")
        return given

    async def messages(self, given: AsyncIterator[Any], read: Read | None) -> AsyncIterator[Any]:
        """Return a stream's messages; see `message`."""
        async for one in given:
            yield await self.message(one, read)

    def _read(self, data: bytes, read: Read) -> Any:
        most = self._fields_max
        if most is not None and has_more_fields(data, _kind(read), most):
            raise InvalidRequestError(f"the message has more than {most} fields, those of its parts included")
        return _tolerant(read)(data)


class _Malformed:
    """Stands for a message that could not be read."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Waiting(NamedTuple):
    """How long the calls of one server wait for their clients; None: for ever."""

    arrivals: Waits | None
    writes: Waits | None


class _Attended:
    """A call's context for its handler, which is cancelled when the client keeps it waiting for too long."""

    def __init__(self, context: Any, task: asyncio.Task[Any], waiting: _Waiting) -> None:
        self.late: BatonError | None = None
        """Why it was cancelled, if it was."""
        self.is_stuck = False
        """The first message has not left. gRPC sends the call's headers with it and would send them again with a
        status, which fails: nothing can be told to this client."""
        self._has_written = False
        self.context = context
        self._task = task
        self._waiting = waiting

    async def read(self) -> Any:
        """Return the call's one message."""
        if (arrivals := self._waiting.arrivals) is None:
            return await self.context.read()
        arrivals.begin(self._no_message)
        try:
            return await self.context.read()
        finally:
            arrivals.end(self._no_message)

    async def write(self, message: Any) -> None:
        """Send a message; returns when there is room for the next one."""
        if (writes := self._waiting.writes) is not None:
            writes.begin(self._unread)
        self.is_stuck = not self._has_written
        await self.context.write(message)
        self._has_written, self.is_stuck = True, False
        if writes is not None:
            writes.end(self._unread)

    def close(self) -> None:
        """End the watch."""
        if self._waiting.writes is not None:
            self._waiting.writes.end(self._unread)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)

    def _no_message(self) -> None:
        assert self._waiting.arrivals is not None
        self._cut(DeadlineError(f"the message did not arrive within {self._waiting.arrivals.limit_s:g} s"))

    def _unread(self) -> None:
        assert self._waiting.writes is not None
        self._cut(OverloadedError(f"no message was taken for {self._waiting.writes.limit_s:g} s"))

    def _cut(self, error: BatonError) -> None:
        self.late = error
        self._task.cancel()


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps the calls of one server. All values are Any: gRPC's handlers are untyped."""

    def __init__(
        self,
        admit: Admit,
        arrival_s: float | None = None,
        fields_max: int | None = None,
        thread: FairThread | None = None,
        unread_s: float | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """Stand before calls.

        Args:
            admit: who may call.
            arrival_s: how long the message of a call that has one may take to arrive; None: for ever.
            fields_max: how many fields a large message may have; None: any number.
            thread: where large messages are read; one of its own unless given.
            unread_s: how long a client may leave an answer untaken; None: for ever.
            sharing: bounds what one client may hold; None: nothing does.
        """
        self._admit = admit
        self._waiting = _Waiting(
            None if arrival_s is None else Waits(arrival_s), None if unread_s is None else Waits(unread_s)
        )
        self._reading = _Reading(thread or FairThread("messages"), fields_max)
        self._sharing = sharing
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

    def _entered(self, context: Any) -> str:
        """Count a call and return who has it."""
        if self._sharing is None:
            return ""
        entered = self._sharing.enter(context.peer())
        context.add_done_callback(lambda _: entered.leave())
        return entered.holder

    def _begun_stream(self, holder: str) -> str | None:
        """Count a call of many messages; return whose it is, if that is counted."""
        if self._sharing is None:
            return None
        streams = self._sharing.streams
        if not streams.take(holder):
            raise OverloadedError(f"{holder} may have {streams.most} streams of requests open", _RETRY_AFTER_S)
        return holder

    async def _message(self, call: _Attended, holder: str, read: Read | None) -> Any:
        """Return a call's one message, when it has arrived and is read."""
        if self._sharing is None:
            return await self._reading.message(await _arrived(call), read)
        async with self._sharing.arrivals.turn(holder):
            return await self._reading.message(await _arrived(call), read)

    def _wrapped(self, handler: Any) -> Any:
        read: Read | None = handler.request_deserializer
        # As calls of streams, all of them: so it is here that a single message is waited for, and not for ever.
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                make, serve = grpc.stream_unary_rpc_method_handler, handler.unary_unary
            case False, True:
                make, serve = grpc.stream_stream_rpc_method_handler, handler.unary_stream
            case True, False:
                make, serve = grpc.stream_unary_rpc_method_handler, handler.stream_unary
            case _:
                make, serve = grpc.stream_stream_rpc_method_handler, handler.stream_stream

        async def guarded(requests: Any, context: Any) -> Any:
            request = streams_of = None
            task = asyncio.current_task()
            assert task is not None, "gRPC serves each call in a task of its own"
            self._calls.add(task)
            call = _Attended(context, task, self._waiting)
            try:
                holder = self._entered(context)
                if handler.request_streaming:
                    streams_of = self._begun_stream(holder)
                    request = self._reading.messages(requests, read)
                else:
                    request = await self._message(call, holder, read)
                result = serve(request, call)
                if not hasattr(result, "__aiter__"):
                    return await result
                async with aclosing(result):
                    async for response in result:
                        await call.write(response)
            except asyncio.CancelledError:
                if call.late is not None:
                    task.uncancel()
                    await _abort(call, call.late)
                if self._end is None or call.is_stuck:
                    raise  # by its client; or nothing can be told to it
                await abort_rpc(context, self._end)
            except BatonError as error:
                await _abort(call, error, path_in(request) if isinstance(request, Message) else str)
            finally:
                self._calls.discard(task)
                call.close()
                if streams_of is not None and self._sharing is not None:
                    self._sharing.streams.leave(streams_of)
            return None

        return make(guarded, None if read is None else _small(read), handler.response_serializer)


async def _arrived(call: _Attended) -> Any:
    """Return a call's one message. A call without it would cost its client nothing, and us memory."""
    message = await call.read()
    if message is _EOF:
        raise InvalidRequestError("the call has no message")
    return message


async def _abort(call: _Attended, error: BatonError, path: Callable[[str], str] = str) -> None:
    """End a call with an error.

    Its client may never read it: the call stays open until what was sent before is taken, or the client leaves.
    """
    if call.is_stuck:
        await asyncio.get_running_loop().create_future()  # until the client leaves, or the server stops
    await abort_rpc(call.context, error, path)


def _refusing(error: BatonError) -> Any:
    """Return a handler that refuses a call of any kind. As one of streams it takes no message in: those are large."""

    async def refuse(_: Any, context: Any) -> None:
        await abort_rpc(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _small(read: Read) -> Read:
    """Return what reads a message at once unless it is large."""
    read_or_mark = _tolerant(read)
    return lambda data: read_or_mark(data) if len(data) <= INLINE_BYTES_MAX else _Large(data)


def _kind(read: Read) -> Descriptor | None:
    """Return what a deserializer makes; None for one that is no generated message's."""
    owner = getattr(read, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, Message)):
        return None
    return owner.DESCRIPTOR  # type: ignore[return-value]  # the stubs know two kinds of descriptors, which are one


def _tolerant(read: Read) -> Read:
    def read_or_mark(data: bytes) -> Any:
        try:
            return read(data)
        except (DecodeError, UnicodeDecodeError) as error:
            return _Malformed(str(error))

    return read_or_mark
