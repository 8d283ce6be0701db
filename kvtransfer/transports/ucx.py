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
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from common.errors import WorkerLostError
from common.hosts import is_loopback
from common.logs import log
from kvtransfer.memory import Memory
from kvtransfer.transports import sockets
from kvtransfer.transports.base import LinkOwner
from kvtransfer.transports.pairing import TOKEN_BYTES, UNPAIRED_MAX, ChannelDoor, Pairing, read_offer
from kvtransfer.transports.ucx_driver import UcxDriver
from kvtransfer.transports.ucx_link import NAME, UcxInbound, UcxOutbound

logger = logging.getLogger(__name__)


class UcxStation:
    """UCX in one process: the driver, and the listener at which senders' endpoints arrive. Owned by the loop."""

    def __init__(self, host: str, connect_timeout_s: float, on_refused: Callable[[], None]) -> None:
        self.driver = UcxDriver(host)
        self._connect_timeout_s = connect_timeout_s
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._pairing: Pairing[UcxInbound] = Pairing()
        self._unpaired: dict[int, Any] = {}
        self._listener = ucx.UCXListener.create(self.driver.worker, 0, self._arrived)
        if is_loopback(host) and not sockets.keep_to_loopback(self._listener.port):
            log(logger, logging.WARNING, "ucx listens on all interfaces: its socket was not found", host=host)
        self.driver.kick()

    def expect(self, link: UcxInbound) -> bytes:
        """Return what a sender needs to reach `link`: port and token."""
        return self._pairing.offer(self._listener.port, link)

    async def connect(self, host: str, extra: bytes, memory: Memory, threads: Executor) -> UcxOutbound:  # noqa: ARG002
        """Make the data channel that a receiver's Hello offers.

        Raises:
            WorkerLostError: not reachable.
            TransferError: the offer is malformed.
        """
        port, token = read_offer(extra, NAME)
        try:
            infos = await sockets.resolve(host, port)
            endpoint = ucx.UCXEndpoint.create(self.driver.worker, infos[0][4][0], port, True)
        except (ucx.UCXError, OSError) as error:
            raise WorkerLostError(f"ucx cannot reach {host}:{port}: {error}") from error
        link = UcxOutbound(self.driver, memory)
        self._pairing.keep(link)
        link.attach(endpoint)
        try:
            showing = self.driver.watch([endpoint.stream_send(Array(token))], token)
            await asyncio.shield(showing)  # it is UCX that ends it
        except BaseException:
            link.close()
            raise
        return link

    async def close(self) -> None:
        """Break every endpoint, and return when UCX uses no buffer of ours any more."""
        self._listener = None
        for key in list(self._unpaired):
            self._turn_away(key)
        self._pairing.close()
        await self.driver.close()

    def _arrived(self, request: int) -> None:
        """Take a new endpoint; called by UCX during progress."""
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except ucx.UCXError as error:
            self._on_refused()
            log(logger, logging.WARNING, f"a ucx endpoint could not be accepted: {error}")
            return
        key = id(endpoint)
        self._unpaired[key] = endpoint
        if len(self._unpaired) > UNPAIRED_MAX:
            self._loop.call_soon(self._turn_away, key)
            return
        token = bytearray(TOKEN_BYTES)
        greeting = self.driver.watch([endpoint.stream_recv(Array(token))], token)
        timer = self._loop.call_later(self._connect_timeout_s, self._turn_away, key)
        greeting.add_done_callback(partial(self._greeted, key, token, timer))

    def _greeted(self, key: int, token: bytearray, timer: asyncio.TimerHandle, greeting: asyncio.Future[None]) -> None:
        timer.cancel()
        failed = greeting.exception() is not None
        link = None if failed or key not in self._unpaired else self._pairing.claim(bytes(token))
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


class UcxDoor(ChannelDoor[UcxInbound]):
    """See ChannelDoor."""

    name = NAME

    def __init__(self, station: UcxStation, host: str, target: Memory, threads: Executor) -> None:
        super().__init__(station, host, target, threads)
        self._driver = station.driver

    def _link(self, owner: LinkOwner) -> UcxInbound:
        return UcxInbound(self._driver, self._target, self._threads, owner)
