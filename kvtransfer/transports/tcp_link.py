"""Pieces over one TCP connection. What surrounds them: see `tcp`.

A piece is a header (tag, bytes) and its runs. Both directions work on the pools themselves: nothing is staged. Threads
move the bytes while they flow; the loop waits for the socket when they do not, so that a slow peer keeps no thread.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol, TypeVar

from common.errors import BatonError, TransferError, WorkerLostError
from kvtransfer.activity import Stop
from kvtransfer.memory import Memory, checksum_of
from kvtransfer.packing import unpack
from kvtransfer.pieces import Runs
from kvtransfer.probe import scratch
from kvtransfer.transports.base import LinkOwner
from kvtransfer.transports.cursor import Cursor
from kvtransfer.transports.tcp_piece import HEADER, Piece, fail_future

NAME = "tcp"
T = TypeVar("T")


class InThread(Protocol):
    """Where a link's bytes are moved."""

    def __call__(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread; it blocks for moments only."""
        ...


class TcpOutbound:
    """Implements `OutboundLink`.

    Args:
        sock: connected, non-blocking; the link closes it.
        memory: the own pool.
        token: sent first.
        in_thread: moves bytes.
    """

    name = NAME
    has_checksums = True
    takes_devices = False

    def __init__(self, sock: socket.socket, memory: Memory, token: bytes, in_thread: InThread) -> None:
        self.on_closed: Callable[[], object] = lambda: None
        self.on_broken: Callable[[BatonError], object] = lambda _: None
        """Called when the receiver's end is gone; set by whoever owns the control connection."""
        self._sock = sock
        self._memory = memory
        self._in_thread = in_thread
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Cursor, asyncio.Future[None]]] = deque()
        self._is_moving = False
        """Whether a thread uses the socket, and the source of the first piece."""
        self._is_closed = False
        self._loop.add_reader(sock, self._readable)
        self._enqueue(Cursor.of(memoryview(token)))

    @property
    def byte_sender(self) -> "TcpOutbound":
        """Itself."""
        return self

    def send(self, runs: Runs, tag: int) -> asyncio.Future[None]:
        """Send a header and the runs; see `OutboundLink.send`."""
        return self._send(Cursor.over(self._memory, runs.sources, runs.sizes), tag)

    def send_bytes(self, data: memoryview, tag: int) -> asyncio.Future[None]:
        """Send a header and `data`; see `ByteSender.send_bytes`."""
        return self._send(Cursor.of(data), tag)

    def close(self) -> None:
        """Close the connection; see `OutboundLink.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        _cut(self._sock, self._is_moving)
        if not self._is_moving:
            self._fail_all()
        self.on_closed()

    def _send(self, cursor: Cursor, tag: int) -> asyncio.Future[None]:
        header = Cursor.of(memoryview(HEADER.pack(tag, cursor.num_bytes)))
        return self._enqueue(header.before(cursor))

    def _enqueue(self, cursor: Cursor) -> asyncio.Future[None]:
        sent: asyncio.Future[None] = self._loop.create_future()
        if self._is_closed:
            fail_future(sent, TransferError("the tcp connection is closed"))
            return sent
        self._queue.append((cursor, sent))
        if len(self._queue) == 1:
            self._move()
        return sent

    def _move(self) -> None:
        """Send for as long as there is room in the socket; then again when there is."""
        self._is_moving = True
        cursor = self._queue[0][0]
        self._in_thread(partial(cursor.send, self._sock)).add_done_callback(self._moved)

    def _moved(self, moving: asyncio.Future[None]) -> None:
        self._is_moving = False
        if self._is_closed:
            self._sock.close()
            self._fail_all()
            return
        if (error := moving.exception()) is not None:
            self._break(error)
            return
        cursor, sent = self._queue[0]
        if cursor.num_bytes:
            self._loop.add_writer(self._sock, self._writable)
            return
        self._queue.popleft()
        if not sent.done():  # whoever waited may have been cancelled
            sent.set_result(None)
        if self._queue:
            self._move()

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock)
        self._move()

    def _fail_all(self) -> None:
        for _, sent in self._queue:
            fail_future(sent, TransferError("the tcp connection is closed"))
        self._queue.clear()

    def _readable(self) -> None:
        """The receiver sends nothing here: this is the end, or a stranger to the protocol."""
        try:
            data = self._sock.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error)
            return
        self._break("it was closed" if not data else "the receiver sent data")

    def _break(self, reason: object) -> None:
        self.close()
        self.on_broken(WorkerLostError(f"the tcp connection to the receiver broke: {reason}"))


class TcpInbound:
    """Implements `InboundLink`. Reads only what was announced: other bytes wait in the kernel, their sender with them.

    Args:
        target: the own pool.
        threads: where packed pieces are unpacked.
        owner: the control connection.
        in_thread: moves bytes.
    """

    name = NAME
    has_checksums = True
    takes_devices = False

    def __init__(self, target: Memory, threads: Executor, owner: LinkOwner, in_thread: InThread) -> None:
        self.on_closed: Callable[[], object] = lambda: None
        self._target = target
        self._threads = threads
        self._owner = owner
        self._in_thread = in_thread
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._expected: deque[Piece[Any]] = deque()
        self._is_moving = False
        """Whether a thread uses the socket, and writes to the target of the first piece."""
        self._is_watching = False
        """Whether the loop does; by its number: asyncio describes a socket in words before it finds it unknown."""
        self._is_closed = False

    def attach(self, sock: socket.socket) -> None:
        """Use the connection that showed this link's token."""
        if self._is_closed:
            sock.close()
            return
        self._sock = sock
        self._watch()
        self._owner.link_is_up()

    @property
    def byte_receiver(self) -> "TcpInbound":
        """Itself."""
        return self

    def receive(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        """Receive each run in its place, or all of them packed; see `InboundLink.receive`."""
        if runs.are_packed:
            return self._receive_packed(runs, tag, checksum, stop)
        cursor = Cursor.over(self._target, runs.targets, runs.sizes)

        def verify() -> int | None:
            return checksum_of(self._target, runs.targets, runs.sizes, stop) if checksum else None

        return self._expect(tag, cursor, stop, verify)

    def receive_bytes(self, buffer: memoryview, tag: int) -> asyncio.Future[None]:
        """Receive into `buffer`; see `ByteReceiver.receive_bytes`."""
        return self._expect(tag, Cursor.of(buffer), Stop(), _nothing)

    def probe(self, num_bytes: int, tag: int) -> asyncio.Future[None]:
        """Receive; see `InboundLink.probe`."""
        return self.receive_bytes(scratch(num_bytes), tag)

    def discard(self, runs: Runs, tag: int) -> None:
        """Read the piece and forget it."""
        self.discard_bytes(runs.num_bytes, tag)

    def discard_bytes(self, num_bytes: int, tag: int) -> None:
        """Read the piece and forget it."""
        self._expect(tag, Cursor.of_nothing(num_bytes), Stop(), _nothing)

    def close(self) -> None:
        """Close the connection; see `InboundLink.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._sock is not None:
            self._rest()
            _cut(self._sock, self._is_moving)
        if not self._is_moving:
            self._fail_all()
        self.on_closed()

    def _expect(self, tag: int, cursor: Cursor, stop: Stop, verify: Callable[[], T]) -> asyncio.Future[T]:
        arrived: asyncio.Future[T] = self._loop.create_future()
        if self._is_closed:
            fail_future(arrived, TransferError("the tcp connection is closed"))
            return arrived
        piece = Piece(tag, cursor, verify, stop, arrived)
        stop.watch(partial(self._stopped, piece))
        self._expected.append(piece)
        if len(self._expected) == 1 and self._sock is not None:
            self._move()
        return arrived

    def _stopped(self, piece: Piece[Any]) -> None:
        """This side does the writing: what is not wanted any more can be left unread, whatever the sender does."""
        if not (self._is_moving and self._expected[0] is piece):
            piece.fail(TransferError("stopped"))

    def _watch(self) -> None:
        """Wait for the rest of a piece, or for the next one; at rest too, for the end of the connection."""
        assert self._sock is not None
        self._is_watching = True
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def _rest(self) -> None:
        """Wait for nothing."""
        if self._is_watching and self._sock is not None:
            self._is_watching = False
            self._loop.remove_reader(self._sock.fileno())

    def _readable(self) -> None:
        assert self._sock is not None
        if self._expected:
            self._move()
            return
        try:
            if not self._sock.recv(1, socket.MSG_PEEK):
                self._break("it was closed")
                return
        except BlockingIOError:
            return
        except OSError as error:
            self._break(str(error))
            return
        self._rest()  # a piece whose Ready is still on its way

    def _move(self) -> None:
        """Read for as long as the first piece flows; then again when it does."""
        assert self._sock is not None
        self._rest()
        self._is_moving = True
        piece = self._expected[0]
        self._in_thread(partial(piece.read, self._sock)).add_done_callback(partial(self._moved, piece))

    def _moved(self, piece: Piece[Any], moving: asyncio.Future[bool]) -> None:
        assert self._sock is not None
        self._is_moving = False
        if self._is_closed:
            self._sock.close()
            self._fail_all()
        elif (error := moving.exception()) is not None:
            self._break(str(error))
        elif not moving.result():
            if piece.stop.is_set:
                piece.fail(TransferError("stopped"))
            self._watch()
        else:
            self._expected.popleft()
            piece.settle()
            if self._expected:
                self._move()
            else:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HEADER.size)
                self._watch()

    def _receive_packed(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        message = self._target.spare.take(runs.num_bytes)
        result: asyncio.Future[int | None] = self._loop.create_future()

        def unpack_it(arrived: asyncio.Future[None]) -> None:
            if (error := arrived.exception()) is not None:
                self._target.spare.give(message)
                fail_future(result, error)
                return
            work = self._loop.run_in_executor(self._threads, unpack, message, self._target, runs, checksum, stop)
            work.add_done_callback(lambda _: self._target.spare.give(message))
            work.add_done_callback(lambda done: _pass_on(done, result))

        self._expect(tag, Cursor.of(message), stop, _nothing).add_done_callback(unpack_it)
        return result

    def _fail_all(self) -> None:
        for piece in self._expected:
            piece.fail(TransferError("the tcp connection is closed"))
        self._expected.clear()

    def _break(self, reason: str) -> None:
        self.close()
        self._owner.lose(TransferError(f"the tcp connection to the sender broke: {reason}"))


def _cut(sock: socket.socket, is_moving: bool) -> None:
    """Close a connection; if a thread uses it, end that, for whoever then closes it: its number must stay its own."""
    if not is_moving:
        sock.close()
        return
    with contextlib.suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)


def _nothing() -> None:
    """Verify nothing."""


def _pass_on(done: asyncio.Future[int | None], result: asyncio.Future[int | None]) -> None:
    if (error := done.exception()) is not None:
        fail_future(result, error)
    elif not result.done():
        result.set_result(done.result())
