"""The least client of a gRPC stream: HTTP/2 frames by hand, so that the load costs little beside what is measured.

It sends one kind of call, in clear, and looks at two messages of each answer: when the first comes, and what the last
says. It does not decode headers: a call that ends without its last message has failed, whatever its status says.
"""

import asyncio
import struct
import time
from collections.abc import Callable
from typing import Any

from baton_pb.v1 import inference_pb2
from common.errors import BatonError, OverloadedError, WorkerLostError

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW = 65_535
_WINDOW_MAX = 2**31 - 1
_NO_PUSH, _STREAM_WINDOW = 2, 4
"""Settings, by their numbers."""
_HEAD_BYTES = 9
_PREFIX_BYTES = 5
"""Before each message: whether it is compressed, and its length."""


class H2Call:
    """One answer as it comes in. Owned by its connection."""

    __slots__ = ("_received", "ended", "first_s", "has_begun", "headers", "last")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first_s = 0.0
        """When the first message came; 0: not yet."""
        self.last = b""
        """The last message so far."""
        self.headers = b""
        """The last ones, as they came: of a call that failed they hold its status."""
        self.has_begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._received = b""

    def take(self, data: bytes) -> None:
        """Take a part of the answer: any number of messages, and pieces of them."""
        if not self.first_s:
            self.first_s = time.monotonic()
            self.has_begun.set_result(None)
        received = self._received + data if self._received else data
        begin = 0
        while len(received) >= begin + _PREFIX_BYTES:
            end = begin + _PREFIX_BYTES + int.from_bytes(received[begin + 1 : begin + _PREFIX_BYTES], "big")
            if len(received) < end:
                break
            self.last = received[begin + _PREFIX_BYTES : end]
            begin = end
        self._received = received[begin:]

    def end(self, error: BatonError | None = None) -> None:
        """Take note that nothing more comes."""
        for waiting in (self.has_begun, self.ended):
            if waiting.done():
                continue
            if error is not None or waiting is self.has_begun:
                waiting.set_exception(error or BatonError(f"the call ended without an answer: {self.headers!r}"))
            else:
                waiting.set_result(None)
            waiting.exception()  # whoever waits sees it; nobody need

    def num_tokens(self) -> int:
        """Return how long the answer was.

        Raises:
            BatonError: its last message does not say so: it was not answered to its end.
        """
        response = inference_pb2.GenerateResponse.FromString(self.last)
        if not response.HasField("finished"):
            raise BatonError(f"the call ended before its answer did: {self.headers!r}")
        return response.finished.usage.output_tokens


class H2Connection(asyncio.Protocol):
    """One connection to a gRPC server, with any number of calls at once. Owned by one loop; `open` makes it."""

    def __init__(self, authority: str, path: str, stream_window: int = _WINDOW_MAX) -> None:
        self._stream_window = stream_window
        self._headers = _header_block(authority, path)
        self._calls: dict[int, H2Call] = {}
        self._next_id = 1
        self._window = _INITIAL_WINDOW
        """Bytes that the server takes for now."""
        self._received = b""
        self._transport: Any = None
        self._takers: dict[int, Callable[[int, int, bytes], None]] = {
            _DATA: self._data,
            _HEADERS: self._header,
            _CONTINUATION: self._header,
            _RESET: self._reset,
            _SETTINGS: self._settings,
            _PING: self._ping,
            _WINDOW: self._more_window,
        }

    @classmethod
    async def open(cls, address: str, path: str, stream_window: int = _WINDOW_MAX) -> "H2Connection":
        """Connect to host:port, for calls of `path` ("/package.Service/Method").

        Args:
            address: of the server.
            path: of the method.
            stream_window: bytes of each answer that are taken.
        """
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(address, path, stream_window), host, int(port))
        return connection

    def call(self, message: bytes) -> H2Call:
        """Send a request.

        Raises:
            OverloadedError: the server takes no more bytes for now.
            WorkerLostError: the connection is closed.
        """
        if self._transport.is_closing():
            raise WorkerLostError("the connection is closed")
        data = b"\0" + len(message).to_bytes(4, "big") + message
        if len(data) > self._window:
            raise OverloadedError(f"a request of {len(data)} bytes, the server takes {self._window} for now")
        self._window -= len(data)
        number, self._next_id = self._next_id, self._next_id + 2
        made = self._calls[number] = H2Call()
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, number, self._headers) + _frame(_DATA, _END_STREAM, number, data)
        )
        return made

    def close(self) -> None:
        """Cut the connection, and with it all calls."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, with room for whatever comes, or for as much of each answer as is taken."""
        self._transport = transport
        settings = struct.pack("!HIHI", _NO_PUSH, 0, _STREAM_WINDOW, self._stream_window)
        more = struct.pack("!I", _WINDOW_MAX - _INITIAL_WINDOW)
        self._transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, more))

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(WorkerLostError(f"the connection broke: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Take all frames that are complete."""
        received = self._received + data if self._received else data
        begin, size = 0, len(received)
        while size - begin >= _HEAD_BYTES:
            body = begin + _HEAD_BYTES
            end = body + int.from_bytes(received[begin : begin + 3], "big")
            if end > size:
                break
            take = self._takers.get(received[begin + 3])
            if take is not None:
                take(received[begin + 4], int.from_bytes(received[begin + 5 : body], "big"), received[body:end])
            elif received[begin + 3] == _GOAWAY:
                self._transport.close()
            begin = end
        self._received = received[begin:]

    def _data(self, flags: int, number: int, body: bytes) -> None:
        if (call := self._calls.get(number)) is not None:
            call.take(body)
            self._end_if(flags, number)

    def _header(self, flags: int, number: int, body: bytes) -> None:
        if (call := self._calls.get(number)) is not None:
            call.headers = body
        self._end_if(flags, number)

    def _end_if(self, flags: int, number: int) -> None:
        if flags & _END_STREAM and (call := self._calls.pop(number, None)) is not None:
            call.end()

    def _reset(self, flags: int, number: int, body: bytes) -> None:
        del flags
        if (call := self._calls.pop(number, None)) is not None:
            call.end(WorkerLostError(f"the server reset the call: {int.from_bytes(body, 'big')}"))

    def _settings(self, flags: int, number: int, body: bytes) -> None:
        del number, body
        if not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))

    def _ping(self, flags: int, number: int, body: bytes) -> None:
        del number
        if not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, body))

    def _more_window(self, flags: int, number: int, body: bytes) -> None:
        del flags
        if number == 0:
            self._window += int.from_bytes(body, "big")


def _frame(kind: int, flags: int, number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + body


def _header_block(authority: str, path: str) -> bytes:
    """Return a call's headers in HPACK, without its table and its Huffman code (RFC 7541, appendix A: the indices)."""
    method_is_post, scheme_is_http = b"\x83", b"\x86"
    return (
        method_is_post
        + scheme_is_http
        + b"\x04"  # :path
        + _string(path)
        + b"\x01"  # :authority
        + _string(authority)
        + b"\x0f\x10"  # content-type, 31 = 15 + 16
        + _string("application/grpc")
        + b"\x00"
        + _string("te")
        + _string("trailers")
    )


def _string(text: str) -> bytes:
    assert len(text) < 127, "its length is one byte"
    return bytes((len(text),)) + text.encode()
