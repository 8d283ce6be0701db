"""Which transport leads to a receiver: shared memory if it can be reached on this host, else UCX. Never in silence."""

import logging
import os
import socket
from typing import Literal

from baton_pb.v1 import transfer_pb2
from common.errors import WorkerLostError
from kvtransfer.sender import Greeter, OutboundPeer
from kvtransfer.transports import shm

logger = logging.getLogger(__name__)


class Dialer:
    """Connects to receivers. Owned by the endpoint's loop."""

    def __init__(self, transport: Literal["auto", "shm", "ucx"], host_id: str, memfd: int | None) -> None:
        self._transport = transport
        self._host_id = host_id
        self._memfd = memfd

    async def dial(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        """Connect by the fastest transport that both ends have; see `kvtransfer.sender.Dialer`."""
        return await self._dial_shm(address, greeter, await shm.connect(address.shm_path))

    async def _dial_shm(
        self, address: transfer_pb2.TransferAddress, greeter: Greeter, sock: socket.socket
    ) -> OutboundPeer:
        assert self._memfd is not None
        peer = OutboundPeer(address, greeter, sock, shm.NAME)
        try:
            fd = shm.read_only(self._memfd)
            try:
                await peer.greet([fd])
            finally:
                os.close(fd)
            peer.start(shm.ShmOutbound())
        except BaseException:
            peer.lose(WorkerLostError("the handshake failed"))
            raise
        return peer
