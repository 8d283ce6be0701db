"""Which transport leads to a receiver: shared memory if it can be reached on this host, else UCX. Never in silence."""

import logging
import os
from typing import TYPE_CHECKING, Literal

from baton_pb.v1 import transfer_pb2
from common.errors import MismatchError, UnauthenticatedError, WorkerLostError
from common.logs import log
from kvtransfer.outbound import Greeter, OutboundPeer
from kvtransfer.transports import shm

if TYPE_CHECKING:  # loading UCX takes half a second: the endpoint does it in a thread, and only where it is wanted
    from kvtransfer.transports.ucx import UcxStation

logger = logging.getLogger(__name__)


class Dialer:
    """Connects to receivers. Owned by the endpoint's loop.

    Args:
        transport: from the config; other than "auto", it is that one or an error.
        host_id: of this process; shared memory needs the receiver's to be equal.
        memfd: of the own pool; None: not shareable.
    """

    def __init__(self, transport: Literal["auto", "shm", "ucx"], host_id: str, memfd: int | None) -> None:
        self.station: UcxStation | None = None
        """Set by the endpoint where UCX is loaded."""
        self._transport = transport
        self._host_id = host_id
        self._memfd = memfd

    async def dial(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        """Connect by the fastest transport that both ends have; see `kvtransfer.sender.Dialer`."""
        if self._transport == "ucx":
            return await self._dial_ucx(address, greeter)
        if address.host_id != self._host_id or not address.shm_path:
            if self._transport == "shm":
                raise MismatchError(f"transport is shm here, but {address.worker_id} is on another host or lacks it")
            return await self._dial_ucx(address, greeter)
        try:
            return await self._dial_shm(address, greeter)
        except (OSError, UnauthenticatedError) as error:
            if self._transport == "shm" or not address.ucx_port or self.station is None:
                raise WorkerLostError(f"cannot reach {address.worker_id} over shared memory: {error}") from error
            reason = str(error)
        peer = await self._dial_ucx(address, greeter)
        greeter.counters.fell_back(address.worker_id, peer.transport)
        fields = {"worker_id": address.worker_id, "reason": reason}
        log(logger, logging.WARNING, "SLOW PATH: a receiver on this host is reached over ucx, not shm", **fields)
        return peer

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

    async def _dial_ucx(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        if self.station is None or not address.ucx_port:
            raise MismatchError(f"no transport in common with {address.worker_id}")
        from kvtransfer.transports import ucx, ucx_link  # loaded by the endpoint

        try:
            sock = await ucx.connect_control(address.host, address.ucx_port)
        except OSError as error:
            raise WorkerLostError(f"cannot reach {address.worker_id} at {address.host}: {error}") from error
        peer = OutboundPeer(address, greeter, sock, ucx_link.NAME)
        try:
            extra = await peer.greet()
            link = await self.station.connect(address.host, extra, greeter.pool.memory, greeter.pool.threads)
            peer.start(link)
            link.on_broken = peer.lose
            await peer.next_hello()
        except BaseException:
            peer.lose(WorkerLostError("the handshake failed"))
            raise
        return peer
