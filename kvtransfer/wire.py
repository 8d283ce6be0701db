"""Frames of a control connection: u32 length, then a `TransferFrame`. Reads and writes a socket on the loop.

No bytes of KV pass here. Whatever a peer sends is checked; a bad frame closes this connection and nothing else.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from baton_pb.v1 import transfer_pb2
from common.errors import (
    BatonError,
    MismatchError,
    OverloadedError,
    TransferError,
    UnauthenticatedError,
    WorkerLostError,
)

PROTOCOL = 1
FRAME_BYTES_MAX = 256 * 1024
OUTBOX_BYTES_MAX = 4 * 1024 * 1024
"""Control bytes that a peer may leave unread before it counts as lost."""
READ_BYTES = 64 * 1024
HEADER = struct.Struct("<I")

# The numbers of gRPC's status codes, so that one table reads all logs; kvtransfer itself does without gRPC.
ERROR_CODES: dict[type[BatonError], int] = {
    TransferError: 15,
    WorkerLostError: 14,
    MismatchError: 9,
    UnauthenticatedError: 16,
    OverloadedError: 8,
}
_BY_CODE = {code: error for error, code in ERROR_CODES.items()}


class FrameError(TransferError):
    """A peer broke the protocol; its connection is closed."""


def abort_frame(transfer_id: bytes, error: BatonError) -> transfer_pb2.TransferFrame:
    """Return the frame that tells a peer that a transfer is over, and why."""
    code = ERROR_CODES.get(type(error), ERROR_CODES[TransferError])
    return transfer_pb2.TransferFrame(
        abort=transfer_pb2.Abort(transfer_id=transfer_id, code=code, message=error.message)
    )


def error_of_abort(abort: transfer_pb2.Abort) -> BatonError:
    """Return the error that an Abort frame carries; an unknown code is a `TransferError`."""
    return _BY_CODE.get(abort.code, TransferError)(abort.message)


class FrameConnection:
    """One connected, non-blocking stream socket. Owned by the loop on which it was made.

    Args:
        sock: connected; the connection closes it.
        on_frame: called with each frame; may raise a `BatonError`, which closes the connection.
        on_lost: called once, when the connection has ended for any reason but `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[transfer_pb2.TransferFrame], None],
        on_lost: Callable[[BatonError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._fds: list[int] = []
        self.is_closed = False
        self.last_received = self.last_sent = self._loop.time()
        self._loop.add_reader(sock, self._read)

    def send(self, frame: transfer_pb2.TransferFrame, fds: Sequence[int] = ()) -> None:
        """Send a frame, with descriptors on a Unix socket. Does nothing once the connection is closed."""
        if self.is_closed:
            return
        payload = frame.SerializeToString()
        assert len(payload) <= FRAME_BYTES_MAX
        data = HEADER.pack(len(payload)) + payload
        self.last_sent = self._loop.time()
        try:
            self._send_now_or_later(data, fds)
        except OSError as error:
            # From a fresh call of the loop: the caller of `send` is in the middle of its own change of state.
            self._loop.call_soon(self._lose, WorkerLostError(f"connection lost: {error}"))

    def take_fd(self) -> int | None:
        """Return the oldest descriptor that the peer passed; the caller closes it."""
        return self._fds.pop(0) if self._fds else None

    def close(self) -> None:
        """Close the socket; `on_lost` is not called."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while (fd := self.take_fd()) is not None:
            os.close(fd)

    def _send_now_or_later(self, data: bytes, fds: Sequence[int]) -> None:
        if fds:
            assert not self._outbox
            sent = self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            data = data[sent:]
        elif not self._outbox:
            with contextlib.suppress(BlockingIOError):
                data = data[self._sock.send(data) :]
        if not data:
            return
        if len(self._outbox) + len(data) > OUTBOX_BYTES_MAX:
            raise OSError("the peer does not read its control connection")
        self._outbox += data
        self._loop.add_writer(self._sock, self._write)

    def _write(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                del self._outbox[: self._sock.send(self._outbox)]
        except OSError as error:
            self._lose(WorkerLostError(f"connection lost: {error}"))
            return
        if not self._outbox:
            self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(WorkerLostError(f"connection lost: {error}"))
            return
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += array.array("i", content[: len(content) - len(content) % 4])
        if not data:
            cut = FrameError(f"connection closed in the middle of a frame, {len(self._inbox)} bytes in")
            self._lose(cut if self._inbox else WorkerLostError("connection closed by the peer"))
            return
        self._inbox += data
        try:
            self._parse()
        except BatonError as error:
            self._lose(error)
        except Exception:  # a bug of ours: the loop reports it, and the peer is not left waiting for an answer
            self._lose(FrameError("a frame could not be handled"))
            raise

    def _parse(self) -> None:
        """Hand out all complete frames."""
        begin = 0
        while not self.is_closed and len(self._inbox) - begin >= HEADER.size:
            (size,) = HEADER.unpack_from(self._inbox, begin)
            if not 0 < size <= FRAME_BYTES_MAX:
                raise FrameError(f"a frame of {size} bytes, at most {FRAME_BYTES_MAX} are allowed")
            end = begin + HEADER.size + size
            if len(self._inbox) < end:
                break
            # Whole frames are signs of life, bytes are not: a stream out of step would wait for its next one for ever.
            self.last_received = self._loop.time()
            self._on_frame(self._decode(bytes(self._inbox[begin + HEADER.size : end])))
            begin = end
        if len(self._fds) > 1:
            raise FrameError("more than one descriptor passed")
        del self._inbox[:begin]

    @staticmethod
    def _decode(payload: bytes) -> transfer_pb2.TransferFrame:
        try:
            frame = transfer_pb2.TransferFrame.FromString(payload)
        except DecodeError as error:
            raise FrameError("a frame that is no TransferFrame") from error
        if frame.WhichOneof("frame") is None:
            raise FrameError("an empty frame, or one of an unknown kind")
        return frame

    def _lose(self, error: BatonError) -> None:
        if not self.is_closed:
            self.close()
            self._on_lost(error)
