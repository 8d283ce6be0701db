"""One HTTP request and its response: reading within limits, server-sent events, and a client that may leave."""

import asyncio
import email.utils
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from pydantic_core import to_json

from cluster.gateway.deadline import Deadline
from cluster.gateway.http.cors import cors_headers
from cluster.gateway.http.hosting import Message, Receive, Send
from cluster.gateway.http.refusals import HttpError, Refusal
from cluster.gateway.request import REQUEST_ID_CHARACTERS_MAX
from common.config_doors import HttpConfig
from common.errors import CancelledRequestError, InvalidRequestError
from common.waits import Waits

_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_COMMENT = b": still waiting\n\n"
_DONE = b"data: [DONE]\n\n"
_TIMEOUT = "x-request-timeout"
_TOO_LARGE = "the body has more than {} bytes"


class Exchange:
    """Owned by the task that serves the request; `attended` runs a second one beside it.

    waiting ──reply──► complete
       └──events, or a keep-alive comment──► streaming ──end or fail──► complete
    """

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        limits: HttpConfig,
        unread: Waits,
        timeout_s: float,
        cut: Callable[[], None],
        is_last: Callable[[], bool],
    ) -> None:
        """Begin.

        Args:
            scope: ASGI's.
            receive: ASGI's.
            send: ASGI's.
            limits: for sizes and waits.
            unread: watches over clients that take nothing.
            timeout_s: most time that the request may have.
            cut: drops the connection at once.
            is_last: whether the connection takes no further request.
        """
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.address: str = scope["client"][0] if scope["client"] else ""
        """Of the client's host."""
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.head_bytes = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"])
        """Of the request's path and headers, without what is between them."""
        self.cors_headers = cors_headers(self.headers, limits.cors_origins) if limits.cors_origins else {}
        """For a browser's page from elsewhere; empty: nothing is allowed."""
        self.request_id = _request_id(self.headers.get("x-request-id", ""))
        self.deadline = Deadline(timeout_s)
        """For whoever serves the request to keep."""
        self.status = 0
        """Of the response; 0 before it has begun."""
        self._receive = receive
        self._asgi_send = send
        self._limits = limits
        self._cut = cut
        self._is_last = is_last
        self._unread = unread
        self._was_cut = False
        self._streams = False
        self._is_complete = False
        self._last_sent_s = 0.0

    def name(self, request_id: str | None) -> None:
        """Take an id from the body, unless a header gave one. Nothing may have been sent."""
        if request_id is not None and "x-request-id" not in self.headers:
            self.request_id = request_id

    @property
    def announced_bytes(self) -> float:
        """Length of the body; infinite if that is not said."""
        announced = self.headers.get("content-length", "")
        if announced.isdecimal():
            return int(announced)
        return math.inf if "transfer-encoding" in self.headers else 0

    async def body(self) -> bytes:
        """Read all of the request's body.

        Raises:
            HttpError: it is too large, or comes too slowly.
            CancelledRequestError: the client left.
        """
        most = self._limits.body_bytes_max
        if most < self.announced_bytes < math.inf:
            # Its end is known, and what comes is dropped: clients read no answer before they have sent everything.
            raise HttpError(413, _TOO_LARGE.format(most))
        parts = bytearray()
        try:
            async with asyncio.timeout(self._limits.arrival_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise CancelledRequestError("the client left while it sent its request")
                    parts += message.get("body", b"")
                    if len(parts) > most:
                        raise HttpError(413, _TOO_LARGE.format(most), {"connection": "close"})
                    if not message.get("more_body", False):
                        return bytes(parts)
        except TimeoutError as error:
            late = f"the body did not arrive within {self._limits.arrival_s:g} s"
            raise HttpError(408, late, {"connection": "close"}) from error

    @asynccontextmanager
    async def attended(self, streams: bool) -> AsyncIterator[None]:
        """Run the block with an eye on the client: it is cancelled at once when the client leaves.

        Args:
            streams: the answer is a stream: send a comment whenever there was nothing for `keepalive_s`.

        Raises:
            CancelledRequestError: the client left.
        """
        self._last_sent_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None) as scope:
                watcher = asyncio.create_task(self._attend(scope, streams), name=f"client of {self.request_id}")
                try:
                    yield
                finally:
                    watcher.cancel()
                    await asyncio.gather(watcher, return_exceptions=True)
        except TimeoutError as error:
            if scope.expired():
                raise CancelledRequestError("the client left") from error
            raise

    async def reply(self, status: int, body: bytes, content_type: str = _JSON, **headers: str) -> None:
        """Answer in one piece."""
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        await self._start(status, {"content-type": content_type, "content-length": str(len(body)), **extra})
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def reply_json(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        await self.reply(status, to_json(value), _JSON, **{k.replace("-", "_"): v for k, v in (headers or {}).items()})

    async def events(self, *values: object) -> None:
        """Send values as events, all in one write; the first call begins the response."""
        await self._write(_events(values))

    async def end(self, *values: object) -> None:
        """End the stream as OpenAI's clients expect, after some last values."""
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": _events(values) + _DONE})

    async def fail(self, refusal: Refusal) -> None:
        """Say what went wrong: by the response's code, or by an event when that has been sent already."""
        if self._is_complete:
            return
        if not self.status:
            await self.reply_json(refusal.status, refusal.body, refusal.headers)
        elif self._streams:
            await self.end(refusal.body)

    async def _write(self, data: bytes) -> None:
        if not self.status:
            self._streams = True
            await self._start(200, {"content-type": _EVENTS, "cache-control": "no-cache", "x-accel-buffering": "no"})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_sent_s = asyncio.get_running_loop().time()

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        common = {"date": email.utils.formatdate(usegmt=True), "x-request-id": self.request_id}
        if self._is_last():
            common["connection"] = "close"
        pairs = [(name.encode(), value.encode()) for name, value in {**common, **self.cors_headers, **headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _send(self, message: Message) -> None:
        """Send, or cut the connection when the client takes nothing."""
        self._unread.begin(self._late)
        await self._asgi_send(message)  # a connection that was cut takes everything
        self._unread.end(self._late)
        if self._was_cut:
            raise CancelledRequestError(f"the client took no bytes for {self._limits.unread_s:g} s")

    def close(self) -> None:
        """End the watch over a client that takes nothing. Nothing may be sent afterwards."""
        self._unread.end(self._late)

    def _late(self) -> None:
        self._was_cut = self._is_complete = True
        self._cut()

    async def _attend(self, scope: asyncio.Timeout, streams: bool) -> None:
        """End `scope` when the client has left; meanwhile keep a quiet stream alive."""
        try:
            while not await self._has_left(streams):
                if asyncio.get_running_loop().time() >= self._keepalive_due_s:
                    await self._write(_COMMENT)
        except CancelledRequestError:
            pass  # it took no bytes
        scope.reschedule(asyncio.get_running_loop().time())

    async def _has_left(self, streams: bool) -> bool:
        """Wait for the client to leave, at most until a comment is due."""
        try:
            async with asyncio.timeout_at(self._keepalive_due_s if streams else None):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return False
        return True

    @property
    def _keepalive_due_s(self) -> float:
        return self._last_sent_s + self._limits.keepalive_s


def wanted_timeout_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a client gives its request by a header; infinite without one.

    Raises:
        InvalidRequestError: it is not a number of seconds.
    """
    given = headers.get(_TIMEOUT)
    if given is None:
        return math.inf
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"{_TIMEOUT} must be a number of seconds above 0, got {given[:40]!r}")
    return seconds


def _events(values: Iterable[object]) -> bytes:
    return b"".join(b"data: %b\n\n" % to_json(value) for value in values)


def _request_id(given: str) -> str:
    """Return the client's own id if it can be used, a new one otherwise."""
    is_fit = 0 < len(given) <= REQUEST_ID_CHARACTERS_MAX // 2 and given.isascii() and given.isprintable()
    return given if is_fit and " " not in given else f"req-{secrets.token_hex(12)}"
