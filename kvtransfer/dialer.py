"""Which transport leads to a receiver: shared memory on this host, else UCX, else plain TCP. Never in silence."""

import logging
import os

from baton_pb.v1 import transfer_pb2
from common.config import Transport
from common.errors import MismatchError, UnauthenticatedError, WorkerLostError
from common.logs import log
from kvtransfer.outbound import Greeter, OutboundPeer
from kvtransfer.probe import Expectation
from kvtransfer.transports import shm, sockets
from kvtransfer.transports.base import Station

logger = logging.getLogger(__name__)


class Dialer:
    """Connects to receivers. Owned by the endpoint's loop.

    Args:
        transport: from the config; other than "auto", it is that one or an error.
        expectation: what a connection has to show.
        own: address of this endpoint: shared memory needs the receiver's host to be the same, NCCL another device.
        memfd: of the own pool; None: not shareable.
    """

    def __init__(
        self, transport: Transport, expectation: Expectation, own: transfer_pb2.TransferAddress, memfd: int | None
    ) -> None:
        self.stations: dict[str, Station] = {}
        """Transports between hosts that can be used here, fastest first; set by the endpoint."""
        self._transport = transport
        self._expectation = expectation
        self._own = own
        self._memfd = memfd

    async def dial(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        """Connect by the fastest transport that both ends have, and measure it; see `kvtransfer.sender.Dialer`."""
        peer, slow = await self._connected(address, greeter)
        try:
            rate = await peer.probe()
            if rate is not None and rate < self._expectation.bytes_per_s:
                expected = self._expectation.bytes_per_s / 1e6
                slow = slow or f"{rate / 1e6:.0f} MB/s were measured, {expected:.0f} are expected"
            if slow:
                greeter.counters.fell_back(address.worker_id, peer.transport)
                fields = {"worker_id": address.worker_id, "transport": peer.transport}
                log(logger, logging.WARNING, f"SLOW PATH: {slow}", **fields)
                if self._expectation.is_strict:
                    raise MismatchError(f"{address.worker_id} is refused over {peer.transport}: {slow}")
        except BaseException:
            peer.lose(WorkerLostError("the connection was given up"))
            raise
        log(
            logger,
            logging.INFO,
            "connected to receiver",
            worker_id=address.worker_id,
            transport=peer.transport,
            mb_per_s=None if rate is None else round(rate / 1e6),
        )
        return peer

    async def _connected(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> tuple[OutboundPeer, str]:
        """Return a connection, and why it is not the one that belongs there ("": it is)."""
        slow = ""
        if self._transport in ("auto", "shm"):
            is_near = address.host_id == self._own.host_id and address.shm_path
            if is_near and (self._memfd is not None or self._transport == "shm"):
                try:
                    return await self._dial_shm(address, greeter), ""
                except (OSError, UnauthenticatedError) as error:
                    slow = f"shm cannot be used on this host: {error}"
                    if self._transport == "shm" or not self._common(address):
                        message = f"cannot reach {address.worker_id} over shared memory: {error}"
                        raise WorkerLostError(message) from error
            elif self._transport == "shm":
                raise MismatchError(f"transport is shm here, but {address.worker_id} is on another host or lacks it")
        names = self._common(address)
        if not names:
            raise MismatchError(f"no transport in common with {address.worker_id}")
        if not slow and self._transport == "auto" and names[0] == "tcp":
            slow = f"ucx cannot be used {'there' if 'ucx' in self.stations else 'here'}"
        return await self._dial_station(names[0], address, greeter), slow

    def _common(self, address: transfer_pb2.TransferAddress) -> list[str]:
        """Return the transports between hosts that both ends have, fastest first."""
        ports = _ports(address)
        if address.device_id == self._own.device_id:
            ports["nccl"] = 0
        return [name for name in self.stations if ports[name]]

    async def _dial_shm(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        if self._memfd is None:
            raise OSError("the own pool has no memfd to share")
        peer = OutboundPeer(address, greeter, await shm.connect(address.shm_path), shm.NAME)
        try:
            fd = shm.read_only(self._memfd)
            try:
                extra = await peer.greet([fd])
            finally:
                os.close(fd)
            peer.start(shm.ShmOutbound(extra))
        except BaseException:
            peer.lose(WorkerLostError("the handshake failed"))
            raise
        return peer

    async def _dial_station(self, name: str, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        try:
            sock = await sockets.connect(address.host, _ports(address)[name])
        except OSError as error:
            raise WorkerLostError(f"cannot reach {address.worker_id} at {address.host}: {error}") from error
        peer = OutboundPeer(address, greeter, sock, name)
        try:
            extra = await peer.greet()
            link = await self.stations[name].connect(address.host, extra, greeter.pool.host, greeter.pool.threads)
            peer.start(link)
            link.on_broken = peer.lose
            await peer.next_hello()
        except BaseException:
            peer.lose(WorkerLostError("the handshake failed"))
            raise
        return peer


def _ports(address: transfer_pb2.TransferAddress) -> dict[str, int]:
    return {"nccl": address.nccl_port, "ucx": address.ucx_port, "tcp": address.tcp_port}
