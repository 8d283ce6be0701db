"""UCX between hosts: over RDMA, NVLink or TCP, whatever UCX finds. Pieces travel as tagged messages.

Each Ready frame (on a TCP control connection) is followed at once by the messages it announces, so every receive that
is posted has its message, and a posted receive always ends: with the bytes, or with the endpoint. Messages of a
transfer that is over are received into nothing (UCX truncates them), so that neither side keeps them. A message is
one run, straight from pool to pool; many small runs are packed into one message through a staging buffer instead.

Tags follow from the ticket's secret and are never used twice: a stale message cannot match a later receive.
The data endpoint is tied to its control connection by a token from the receiver's Hello, sent back as the first bytes
of the endpoint's stream. They live and die together.
"""

import asyncio
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from baton_pb.v1 import transfer_pb2
from common.errors import BatonError, TransferError, WorkerLostError
from common.logs import log
from kvtransfer.activity import Stop
from kvtransfer.memory import Memory, checksum_of, copy_runs
from kvtransfer.pieces import Run
from kvtransfer.ticket import run_tag
from kvtransfer.transports.base import Greeting, LinkOwner
from kvtransfer.transports.ucx_driver import UcxDriver

logger = logging.getLogger(__name__)

NAME = "ucx"
TOKEN_BYTES = 32
UNPAIRED_MAX = 64
BACKLOG = 128
PACK_BELOW_BYTES = 64 * 1024
"""Pieces whose runs are smaller on average are packed: a message costs 15-40 us of Python at each end."""
_EXTRA = struct.Struct(f"<H{TOKEN_BYTES}s")


class UcxStation:
    """UCX in one process: the driver, and the listener at which senders' endpoints arrive. Owned by the loop."""

    def __init__(self, host: str, connect_timeout_s: float, on_refused: Callable[[], None]) -> None:
        self.driver = UcxDriver(host)
        self._connect_timeout_s = connect_timeout_s
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._expected: dict[bytes, UcxInbound] = {}
        self._unpaired: dict[int, Any] = {}
        self._links: set[_Link] = set()
        self._listener = ucx.UCXListener.create(self.driver.worker, 0, self._arrived)
        self.driver.kick()

    def expect(self, link: "UcxInbound") -> bytes:
        """Return what a sender needs to reach `link`: port and token."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = link
        self._links.add(link)
        link.on_closed = partial(self._forget, link, token)
        return _EXTRA.pack(self._listener.port, token)

    async def connect(self, host: str, extra: bytes, memory: Memory, threads: Executor) -> "UcxOutbound":
        """Make the data channel that a receiver's Hello offers.

        Raises:
            WorkerLostError: not reachable.
            TransferError: the offer is malformed.
        """
        if len(extra) != _EXTRA.size:
            raise TransferError("the receiver's Hello does not offer ucx")
        port, token = _EXTRA.unpack(extra)
        infos = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        try:
            endpoint = ucx.UCXEndpoint.create(self.driver.worker, infos[0][4][0], port, True)
        except ucx.UCXError as error:
            raise WorkerLostError(f"ucx cannot reach {host}:{port}: {error}") from error
        link = UcxOutbound(self.driver, memory, threads)
        self._links.add(link)
        link.on_closed = partial(self._forget, link, b"")
        link.attach(endpoint)
        try:
            await self.driver.watch(endpoint.stream_send(Array(token)), token)
        except BaseException:
            link.close()
            raise
        return link

    async def close(self) -> None:
        """Break every endpoint, and return when UCX uses no buffer of ours any more."""
        self._listener = None
        for key in list(self._unpaired):
            self._turn_away(key)
        for link in list(self._links):
            link.close()
        await self.driver.close()

    def _forget(self, link: "_Link", token: bytes) -> None:
        self._expected.pop(token, None)
        self._links.discard(link)

    def _arrived(self, request: int) -> None:
        """Take a new endpoint; called by UCX during progress."""
        endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        key = id(endpoint)
        self._unpaired[key] = endpoint
        if len(self._unpaired) > UNPAIRED_MAX:
            self._loop.call_soon(self._turn_away, key)
            return
        token = bytearray(TOKEN_BYTES)
        greeting = self.driver.watch(endpoint.stream_recv(Array(token)), token)
        timer = self._loop.call_later(self._connect_timeout_s, self._turn_away, key)
        greeting.add_done_callback(partial(self._greeted, key, token, timer))

    def _greeted(self, key: int, token: bytearray, timer: asyncio.TimerHandle, greeting: asyncio.Future[None]) -> None:
        timer.cancel()
        failed = greeting.exception() is not None
        link = None if failed or key not in self._unpaired else self._expected.pop(bytes(token), None)
        if link is None:
            self._turn_away(key)
        else:
            link.attach(self._unpaired.pop(key))

    def _turn_away(self, key: int) -> None:
        endpoint = self._unpaired.pop(key, None)
        if endpoint is not None:
            self._on_refused()
            log(logger, logging.WARNING, "turned a ucx endpoint away: it belongs to no sender")
            self.driver.close_endpoint(endpoint)


class _Link:
    """What both directions share: one UCX endpoint, and posting on it."""

    name = NAME

    def __init__(self, driver: UcxDriver) -> None:
        self.on_closed: Callable[[], object] = lambda: None
        self._driver = driver
        self._endpoint: Any = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    def attach(self, endpoint: Any) -> None:
        """Use `endpoint` from now on."""
        self._endpoint = endpoint
        loop = self._loop
        # Called by UCX during progress, where nothing may be closed: hence from a fresh call of the loop.
        endpoint.set_close_callback(lambda: loop.call_soon(self._broken))
        if self._is_closed:
            self._close_endpoint()
        elif not endpoint.alive:
            loop.call_soon(self._broken)

    def close(self) -> None:
        """Break the endpoint; see `OutboundLink.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._close_endpoint()
            self.on_closed()

    def _broken(self) -> None:
        """Note that the peer's endpoint is gone."""
        self.close()

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            self._driver.close_endpoint(endpoint)

    def _post(self, buffer: memoryview, tag: int, is_send: bool) -> asyncio.Future[None]:
        """Submit one message; the future fails if there is no endpoint any more."""
        failed: asyncio.Future[None] = self._loop.create_future()
        if self._endpoint is None:
            failed.set_exception(TransferError("the ucx endpoint is closed"))
            return failed
        assert buffer.c_contiguous  # UCX takes a strided view for contiguous, and says nothing
        submit = self._endpoint.tag_send if is_send else self._endpoint.tag_recv
        try:
            return self._driver.watch(submit(Array(buffer), ucx.UCXXTag(tag)), buffer)
        except ucx.UCXError as error:
            failed.set_exception(TransferError(f"ucx: {error}"))
            return failed


class UcxOutbound(_Link):
    """Implements `OutboundLink`."""

    def __init__(self, driver: UcxDriver, memory: Memory, threads: Executor) -> None:
        super().__init__(driver)
        self._memory = memory
        self._threads = threads
        self.on_broken: Callable[[BatonError], object] = lambda _: None
        """Called when the receiver's endpoint is gone; set by whoever owns the control connection."""

    def send(self, runs: Sequence[Run], tag: int) -> asyncio.Future[None]:
        """Send each run, or all of them packed; see `OutboundLink.send`."""
        if _is_packed(runs):
            return self._driver.start(self._send_packed(runs, tag))
        view = self._memory.view
        sends = [
            self._post(view[run.source : run.source + run.num_bytes], run_tag(tag, i), is_send=True)
            for i, run in enumerate(runs)
        ]
        return self._driver.start(_all_done(sends))

    async def _send_packed(self, runs: Sequence[Run], tag: int) -> None:
        # Not stoppable: the receiver has posted its receive.
        staging, moves = _staging(runs, to_staging=True)
        await self._loop.run_in_executor(self._threads, copy_runs, self._memory, staging, moves, False, Stop())
        await self._post(staging.view, tag, is_send=True)

    def _broken(self) -> None:
        super()._broken()
        self.on_broken(WorkerLostError("the receiver's ucx endpoint is gone"))


class UcxInbound(_Link):
    """Implements `InboundLink`."""

    def __init__(self, driver: UcxDriver, target: Memory, threads: Executor, owner: LinkOwner) -> None:
        super().__init__(driver)
        self._target = target
        self._threads = threads
        self._owner = owner
        self._nothing = memoryview(bytearray(1))

    def attach(self, endpoint: Any) -> None:
        """Use the endpoint that showed this link's token."""
        super().attach(endpoint)
        if not self._is_closed:
            self._owner.link_is_up()

    def receive(self, runs: Sequence[Run], tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        """Receive each run in its place, or all of them packed; see `InboundLink.receive`."""
        if _is_packed(runs):
            staging, moves = _staging(runs, to_staging=False)
            packed = self._post(staging.view, tag, is_send=False)
            return self._driver.start(self._unpack(packed, staging, moves, checksum, stop))
        view = self._target.view
        receives = [
            self._post(view[run.target : run.target + run.num_bytes], run_tag(tag, i), is_send=False)
            for i, run in enumerate(runs)
        ]
        return self._driver.start(self._verify(receives, runs, checksum, stop))

    def discard(self, runs: Sequence[Run], tag: int) -> None:
        """Receive into a single byte: UCX ends the message as truncated, at both ends."""
        for i in range(1 if _is_packed(runs) else len(runs)):
            self._driver.start(_ended(self._post(self._nothing, run_tag(tag, i), is_send=False)))

    async def _unpack(
        self, packed: asyncio.Future[None], staging: Memory, moves: Sequence[Run], checksum: bool, stop: Stop
    ) -> int | None:
        await packed
        return await self._loop.run_in_executor(self._threads, copy_runs, staging, self._target, moves, checksum, stop)

    async def _verify(
        self, receives: Sequence[asyncio.Future[None]], runs: Sequence[Run], checksum: bool, stop: Stop
    ) -> int | None:
        await _all_done(receives)
        if not checksum:
            return None
        ranges = [(run.target, run.num_bytes) for run in runs]
        return await self._loop.run_in_executor(self._threads, checksum_of, self._target, ranges, stop)

    def _broken(self) -> None:
        super()._broken()
        self._owner.lose(TransferError("the sender's ucx endpoint is gone"))


class UcxDoor:
    """Implements `Door`: a TCP socket for control connections."""

    name = NAME

    def __init__(self, station: UcxStation, host: str, target: Memory, threads: Executor) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.sock.setblocking(False)
        self.port: int = self.sock.getsockname()[1]
        self._station = station
        self._target = target
        self._threads = threads

    def check(self, sock: socket.socket) -> None:
        """Send small frames at once. Anybody may connect: the ticket's secret decides."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self, hello: transfer_pb2.Hello, fd: int | None, owner: LinkOwner) -> Greeting:  # noqa: ARG002
        """Offer a data channel; it is up when the sender's endpoint has shown the token."""
        link = UcxInbound(self._station.driver, self._target, self._threads, owner)
        return Greeting(link, self._station.expect(link), is_up=False)


async def connect_control(host: str, port: int) -> socket.socket:
    """Return a connected TCP socket for frames; raises OSError."""
    loop = asyncio.get_running_loop()
    family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
    try:
        await loop.sock_connect(sock, address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_packed(runs: Sequence[Run]) -> bool:
    """Whether a piece travels as one message; both ends decide alike."""
    return len(runs) > 1 and sum(run.num_bytes for run in runs) < len(runs) * PACK_BELOW_BYTES


def _staging(runs: Sequence[Run], to_staging: bool) -> tuple[Memory, list[Run]]:
    """Return a buffer for packed runs, and the moves into it from a source, or out of it to a target."""
    moves: list[Run] = []
    at = 0
    for run in runs:
        moves.append(run._replace(target=at) if to_staging else run._replace(source=at))
        at += run.num_bytes
    return Memory(memoryview(bytearray(at))), moves


async def _all_done(futures: Sequence[asyncio.Future[None]]) -> None:
    """Wait until all have ended, then raise the first error: before that, UCX may still use some buffer."""
    for result in await asyncio.gather(*futures, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _ended(future: asyncio.Future[None]) -> None:
    await asyncio.wait([future])
    future.exception()
