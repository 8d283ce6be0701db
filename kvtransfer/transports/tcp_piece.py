"""A piece that was announced over TCP and has not come yet."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.transports.cursor import Cursor

HEADER = struct.Struct("<QQ48x")
"""Tag and bytes of a piece. Padded to a cache line, as all that precedes a piece on the connection is: kernels copy by
`rep movsb`, which takes ten times as long on Zen 3 where the target lies 1 to 31 bytes behind the source, modulo a page
(measured: 1.6 instead of 15 GB/s), and what is sent from the begin of a page behind 16 bytes lies so."""

T = TypeVar("T")


class Piece(Generic[T]):
    """What is expected, and how much of it has come.

    Args:
        tag: of its header.
        cursor: where it goes.
        verify: called in the thread when it is there.
        stop: from then on its bytes pass by.
        arrived: resolved on the loop, when nothing writes to the targets any more.
    """

    def __init__(
        self, tag: int, cursor: Cursor, verify: Callable[[], T], stop: Stop, arrived: asyncio.Future[T]
    ) -> None:
        self.stop = stop
        self.arrived = arrived
        self._verify = verify
        self._expected = HEADER.pack(tag, cursor.num_bytes)
        self._header = bytearray(HEADER.size)
        self._in_header = Cursor.of(memoryview(self._header))
        self._cursor = cursor
        self._is_wanted = True
        self._verified: T

    def read(self, sock: socket.socket) -> bool:
        """Take what comes, as long as it flows; return whether that is all. In a thread.

        Raises:
            TransferError: what comes is not this piece.
            EOFError: the sender has closed the connection.
            OSError: it is broken.
        """
        if self._in_header.num_bytes:
            self._in_header.receive(sock, Stop())
            if self._in_header.num_bytes:
                return False
            if self._header != self._expected:
                raise TransferError("a piece came that was not announced next")
        if self._is_wanted and self.stop.is_set:
            self._is_wanted = False
            self._cursor = Cursor.of_nothing(self._cursor.num_bytes)
        self._cursor.receive(sock, self.stop if self._is_wanted else Stop())
        if self._cursor.num_bytes:
            return False
        if self._is_wanted:
            with contextlib.suppress(TransferError):  # stopped meanwhile, as the loop will see
                self._verified = self._verify()
        return True

    def settle(self) -> None:
        """Tell the outcome of a piece that is through. On the loop."""
        if self.stop.is_set:
            self.fail(TransferError("stopped"))
        elif not self.arrived.done():  # whoever waited may have been cancelled
            self.arrived.set_result(self._verified)

    def fail(self, error: BaseException) -> None:
        """Tell that it will not come."""
        fail_future(self.arrived, error)


def fail_future(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a future with an error, unless it is over; nobody has to look at it."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # it may end while nobody waits
