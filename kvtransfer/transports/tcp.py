"""Plain TCP between hosts: the baseline, and what is left where UCX cannot be used.

A data connection beside the control connection carries the pieces in the order of their Ready frames, each behind a
header of tag and length, gathered from one pool and scattered into the other by the kernel. The data connection is
tied to its control connection by a token from the receiver's Hello, its first bytes. They live and die together.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from common.control_groups import usable_cores
from common.errors import WorkerLostError
from common.logs import log
from kvtransfer.memory import Memory
from kvtransfer.transports import sockets
from kvtransfer.transports.base import LinkOwner
from kvtransfer.transports.pairing import TOKEN_BYTES, UNPAIRED_MAX, ChannelDoor, Pairing, read_offer
from kvtransfer.transports.tcp_link import NAME, TcpInbound, TcpOutbound

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TcpStation:
    """Where senders' data connections arrive. Owned by the loop.

    Args:
        host: address to listen on.
        connect_timeout_s: a data connection that has not shown its token by then is closed.
        on_refused: called for each that belongs to no sender.
    """

    def __init__(self, host: str, connect_timeout_s: float, on_refused: Callable[[], None]) -> None:
        self._sock, self._port = sockets.listen(host)
        self._connect_timeout_s = connect_timeout_s
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._pairing: Pairing[TcpInbound] = Pairing()
        # Not those that copy and hash: a piece is hashed while the one before it is sent.
        self._threads = ThreadPoolExecutor(max(2, min(4, usable_cores() // 2)), thread_name_prefix="kvtcp")
        self._moving: set[asyncio.Future[Any]] = set()
        self._greeting: set[asyncio.Task[None]] = set()
        self._loop.add_reader(self._sock, self._accept)

    def expect(self, link: TcpInbound) -> bytes:
        """Return what a sender needs to reach `link`: port and token."""
        return self._pairing.offer(self._port, link)

    async def connect(self, host: str, extra: bytes, memory: Memory, threads: Executor) -> TcpOutbound:  # noqa: ARG002
        """Make the data connection that a receiver's Hello offers.

        Raises:
            WorkerLostError: not reachable.
            TransferError: the offer is malformed.
        """
        port, token = read_offer(extra, NAME)
        try:
            sock = await sockets.connect(host, port)
        except OSError as error:
            raise WorkerLostError(f"tcp cannot reach {host}:{port}: {error}") from error
        link = TcpOutbound(sock, memory, token, self.in_thread)
        self._pairing.keep(link)
        return link

    def in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Implement `InThread`."""
        moving = self._loop.run_in_executor(self._threads, work)
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)
        return moving

    async def close(self) -> None:
        """Close the door and every connection; returns when no thread uses one."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        self._pairing.close()
        greeting = list(self._greeting)
        for task in greeting:
            task.cancel()
        if ending := [*greeting, *self._moving]:
            await asyncio.wait(ending)
        self._threads.shutdown()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:  # gone again, or out of descriptors: the next event tries again
            return
        sock.setblocking(False)
        if len(self._greeting) >= UNPAIRED_MAX:
            self._turn_away(sock)
            return
        task = self._loop.create_task(self._greet(sock))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, sock: socket.socket) -> None:
        """Pair a connection with the link whose token it shows."""
        token = b""
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._connect_timeout_s):
                    while len(token) < TOKEN_BYTES:
                        data = await self._loop.sock_recv(sock, TOKEN_BYTES - len(token))
                        if not data:
                            break
                        token += data
        except BaseException:
            sock.close()
            raise
        link = self._pairing.claim(token)
        if link is None:
            self._turn_away(sock)
        else:
            link.attach(sock)

    def _turn_away(self, sock: socket.socket) -> None:
        sock.close()
        self._on_refused()
        log(logger, logging.WARNING, "turned a tcp data connection away: it belongs to no sender")


class TcpDoor(ChannelDoor[TcpInbound]):
    """See ChannelDoor."""

    name = NAME

    def __init__(self, station: TcpStation, host: str, target: Memory, threads: Executor) -> None:
        super().__init__(station, host, target, threads)
        self._in_thread = station.in_thread

    def _link(self, owner: LinkOwner) -> TcpInbound:
        return TcpInbound(self._target, self._threads, owner, self._in_thread)
