"""Pieces over one TCP connection, written and read on the loop in bounded steps. What surrounds them: see `tcp`.

A piece is a header (tag, bytes) and its runs. Both directions work on the pools themselves: nothing is staged.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from common.errors import BatonError, TransferError, WorkerLostError
from kvtransfer.activity import Stop
from kvtransfer.memory import Memory, checksum_of
from kvtransfer.packing import unpack
from kvtransfer.pieces import Runs
from kvtransfer.probe import scratch
from kvtransfer.transports.base import LinkOwner
from kvtransfer.transports.cursor import IOV_MAX, Cursor

NAME = "tcp"
HEADER = struct.Struct("<QQ")
WAKE_BYTES = 512 * 1024
"""The loop is woken when so much has come, or what is left of the piece: each time costs as much as copying 200 KB."""


class TcpOutbound:
    """Implements `OutboundLink`.

    Args:
        sock: connected, non-blocking; the link closes it.
        memory: the own pool.
        token: sent first.
    """

    name = NAME
    has_checksums = True
    takes_devices = False

    def __init__(self, sock: socket.socket, memory: Memory, token: bytes) -> None:
        self.on_closed: Callable[[], object] = lambda: None
        self.on_broken: Callable[[BatonError], object] = lambda _: None
        """Called when the receiver's end is gone; set by whoever owns the control connection."""
        self._sock = sock
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Cursor, asyncio.Future[None]]] = deque()
        self._is_closed = False
        self._loop.add_reader(sock, self._readable)
        self._enqueue(Cursor([memoryview(token)]))

    @property
    def byte_sender(self) -> "TcpOutbound":
        """Itself."""
        return self

    def send(self, runs: Runs, tag: int) -> asyncio.Future[None]:
        """Send a header and the runs; see `OutboundLink.send`."""
        return self._send(Cursor.over(self._memory, runs.sources, runs.sizes), tag)

    def send_bytes(self, data: memoryview, tag: int) -> asyncio.Future[None]:
        """Send a header and `data`; see `ByteSender.send_bytes`."""
        return self._send(Cursor([data]), tag)

    def close(self) -> None:
        """Close the connection; see `OutboundLink.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, sent in self._queue:
            _fail(sent, TransferError("the tcp connection is closed"))
        self._queue.clear()
        self.on_closed()

    def _send(self, cursor: Cursor, tag: int) -> asyncio.Future[None]:
        self._enqueue(Cursor([memoryview(HEADER.pack(tag, cursor.num_bytes))]))
        return self._enqueue(cursor)

    def _enqueue(self, cursor: Cursor) -> asyncio.Future[None]:
        sent: asyncio.Future[None] = self._loop.create_future()
        if self._is_closed:
            _fail(sent, TransferError("the tcp connection is closed"))
            return sent
        if not self._queue:
            self._loop.add_writer(self._sock, self._writable)
        self._queue.append((cursor, sent))
        return sent

    def _writable(self) -> None:
        first = self._queue[0][0]
        window = first.window()
        if first.num_bytes <= HEADER.size and len(self._queue) > 1:  # a header, and what follows it
            window += self._queue[1][0].window()[: IOV_MAX - 1]
        try:
            num_bytes = self._sock.sendmsg(window)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error)
            return
        while self._queue:
            cursor, sent = self._queue[0]
            step = min(num_bytes, cursor.num_bytes)
            cursor.advance(step)
            num_bytes -= step
            if cursor.num_bytes:
                return
            self._queue.popleft()
            sent.set_result(None)
        self._loop.remove_writer(self._sock)

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


class _Expected(NamedTuple):
    """A piece that was announced and has not come yet."""

    tag: int
    num_bytes: int
    cursor: Cursor | None
    """Where it goes; None: the transfer is over, the bytes pass by."""
    stop: Stop
    arrived: asyncio.Future[None]


class TcpInbound:
    """Implements `InboundLink`. Reads only what was announced: other bytes wait in the kernel, their sender with them.

    Args:
        target: the own pool.
        threads: where checksums are computed.
        owner: the control connection.
    """

    name = NAME
    has_checksums = True
    takes_devices = False

    def __init__(self, target: Memory, threads: Executor, owner: LinkOwner) -> None:
        self.on_closed: Callable[[], object] = lambda: None
        self._target = target
        self._threads = threads
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._expected: deque[_Expected] = deque()
        self._header = bytearray(HEADER.size)
        self._cursor = Cursor([memoryview(self._header)])
        self._is_in_header = True
        self._wake_bytes = 1
        self._nothing = memoryview(bytearray(64 * 1024))
        self._is_closed = False

    def attach(self, sock: socket.socket) -> None:
        """Use the connection that showed this link's token."""
        if self._is_closed:
            sock.close()
            return
        self._sock = sock
        self._wake_when_enough()
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
        result: asyncio.Future[int | None] = self._loop.create_future()
        # This side does the writing: what is not wanted any more can be left unread, whatever the sender does.
        stop.watch(partial(_fail, result, TransferError("stopped")))
        cursor = Cursor.over(self._target, runs.targets, runs.sizes)
        arrived = self._expect(tag, runs.num_bytes, cursor, stop)
        arrived.add_done_callback(partial(self._arrived, runs if checksum else None, stop, result))
        return result

    def receive_bytes(self, buffer: memoryview, tag: int) -> asyncio.Future[None]:
        """Receive into `buffer`; see `ByteReceiver.receive_bytes`."""
        return self._expect(tag, len(buffer), Cursor([buffer]), Stop())

    def probe(self, num_bytes: int, tag: int) -> asyncio.Future[None]:
        """Receive; see `InboundLink.probe`."""
        return self.receive_bytes(scratch(num_bytes), tag)

    def discard(self, runs: Runs, tag: int) -> None:
        """Read the piece and forget it."""
        self.discard_bytes(runs.num_bytes, tag)

    def discard_bytes(self, num_bytes: int, tag: int) -> None:
        """Read the piece and forget it."""
        self._expect(tag, num_bytes, None, Stop()).add_done_callback(lambda done: done.exception())

    def close(self) -> None:
        """Close the connection; see `InboundLink.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        for piece in self._expected:
            _fail(piece.arrived, TransferError("the tcp connection is closed"))
        self._expected.clear()
        self.on_closed()

    def _expect(self, tag: int, num_bytes: int, cursor: Cursor | None, stop: Stop) -> asyncio.Future[None]:
        arrived: asyncio.Future[None] = self._loop.create_future()
        if self._is_closed:
            _fail(arrived, TransferError("the tcp connection is closed"))
        else:
            self._expected.append(_Expected(tag, num_bytes, cursor, stop, arrived))
            self._watch()
        return arrived

    def _watch(self) -> None:
        """Read while something is expected. At rest the socket is watched too: for its end."""
        if self._sock is not None:
            self._loop.add_reader(self._sock, self._readable)

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            if not self._expected:
                if not self._sock.recv(1, socket.MSG_PEEK):
                    raise EOFError("it was closed")
                self._loop.remove_reader(self._sock)  # a piece whose Ready is still on its way
                return
            num_bytes = self._sock.recvmsg_into(self._window())[0]
            if num_bytes == 0:
                raise EOFError("it was closed")
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._break(str(error))
            return
        self._advance(num_bytes)

    def _window(self) -> list[memoryview]:
        """Return where the next bytes go: nowhere, if nobody wants this piece any more."""
        piece = self._expected[0]
        if self._is_in_header or (piece.cursor is not None and not piece.stop.is_set):
            return self._cursor.window()
        return [self._nothing[: min(self._cursor.num_bytes, len(self._nothing))]]

    def _advance(self, num_bytes: int) -> None:
        self._cursor.advance(num_bytes)
        if not self._cursor.num_bytes:
            if self._is_in_header:
                self._begin_piece()
            else:
                self._end_piece()
        self._wake_when_enough()

    def _wake_when_enough(self) -> None:
        """Let the kernel wait for more bytes than one; the end of the connection is told at once."""
        enough = min(WAKE_BYTES, self._cursor.num_bytes)
        if enough != self._wake_bytes and self._sock is not None and not self._is_closed:
            self._wake_bytes = enough
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def _begin_piece(self) -> None:
        piece = self._expected[0]
        if HEADER.unpack(self._header) != (piece.tag, piece.num_bytes):
            self._break("a piece came that was not announced next")
            return
        self._is_in_header = False
        self._cursor = piece.cursor or Cursor.of_nothing(piece.num_bytes)

    def _end_piece(self) -> None:
        piece = self._expected.popleft()
        self._is_in_header = True
        self._cursor = Cursor([memoryview(self._header)])
        piece.arrived.set_result(None)

    def _arrived(
        self, runs: Runs | None, stop: Stop, result: asyncio.Future[int | None], arrived: asyncio.Future[None]
    ) -> None:
        """Verify a piece that is in place, where that is wanted."""
        if (error := arrived.exception()) is not None:
            _fail(result, error)
        elif result.done():
            pass
        elif runs is None:
            result.set_result(None)
        else:
            ranges = runs.targets, runs.sizes
            hashing = self._loop.run_in_executor(self._threads, checksum_of, self._target, *ranges, stop)
            hashing.add_done_callback(lambda done: _pass_on(done, result))

    def _receive_packed(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        message = self._target.spare.take(runs.num_bytes)
        result: asyncio.Future[int | None] = self._loop.create_future()
        arrived = self._expect(tag, runs.num_bytes, Cursor([message]), stop)

        def stopped() -> None:
            if not arrived.done():  # else a thread may be writing, and has the last word
                _fail(result, TransferError("stopped"))

        def unpack_it(arrived: asyncio.Future[None]) -> None:
            if (error := arrived.exception()) is not None:
                _fail(result, error)
            if result.done():
                self._target.spare.give(message)
                return
            work = self._loop.run_in_executor(self._threads, unpack, message, self._target, runs, checksum, stop)
            work.add_done_callback(lambda _: self._target.spare.give(message))
            work.add_done_callback(lambda done: _pass_on(done, result))

        stop.watch(stopped)
        arrived.add_done_callback(unpack_it)
        return result

    def _break(self, reason: str) -> None:
        self.close()
        self._owner.lose(TransferError(f"the tcp connection to the sender broke: {reason}"))


def _fail(future: asyncio.Future[None] | asyncio.Future[int | None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # it may end while nobody waits


def _pass_on(done: asyncio.Future[int] | asyncio.Future[int | None], result: asyncio.Future[int | None]) -> None:
    if result.done():
        return
    if (error := done.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())
