"""NCCL from one GPU to another, where UCX has no way between them: neither end touches host memory.

A communicator of two ranks belongs to each connection, the sender being rank 0. It is made when the connection is: its
id comes in the receiver's Hello. Pieces go one after another in the order of their Ready frames; behind each is its
tag, which the receiver compares. A receiver receives beside its pool and copies into it what is still wanted: a piece
of a transfer that is over costs a buffer and harms no block. When a connection ends, its communicator is aborted.

NCCL does not authenticate: it belongs on a private network.
"""

import asyncio
import logging
import socket
from concurrent.futures import Executor

from baton_pb.v1 import transfer_pb2
from common.errors import MismatchError, TransferError, WorkerLostError
from kvtransfer.device import Communicators, Device
from kvtransfer.memory import Memory
from kvtransfer.transports import sockets
from kvtransfer.transports.base import Greeting, LinkOwner
from kvtransfer.transports.nccl_link import NAME, NcclInbound, NcclLink, NcclOutbound

logger = logging.getLogger(__name__)

ID_BYTES = 128
CLOSE_PATIENCE_S = 15.0
"""Three times what an abort waits before it insists."""


class NcclStation:
    """The links of one endpoint. Implements `Station`. Owned by the loop."""

    def __init__(self, device: Device, communicators: Communicators) -> None:
        self.device = device
        self.communicators = communicators
        self._links: set[NcclLink] = set()

    def keep(self, link: NcclLink) -> None:
        """Know a link until its thread has ended."""
        self._links.add(link)
        link.lane.ended.add_done_callback(lambda _: self._links.discard(link))

    async def connect(self, host: str, extra: bytes, memory: Memory, threads: Executor) -> NcclOutbound:  # noqa: ARG002
        """Join the communicator that a receiver's Hello offers; see `Station.connect`."""
        if len(extra) != ID_BYTES:
            raise TransferError("the receiver's Hello does not offer nccl")
        link = NcclOutbound(self.device, self.communicators, extra)
        self.keep(link)
        try:
            await asyncio.shield(link.lane.joined)
        except TransferError as error:
            link.close()
            raise WorkerLostError(f"nccl does not lead to {host}: {error}") from error
        except BaseException:
            link.close()
            raise
        return link

    async def close(self) -> None:
        """Abort every communicator, and return when no thread uses a buffer of ours; or when an abort hangs."""
        links = list(self._links)
        for link in links:
            link.close()
        if links:
            _, hanging = await asyncio.wait([link.lane.ended for link in links], timeout=CLOSE_PATIENCE_S)
            if hanging:
                logger.error("%d nccl links do not end: their blocks may still be written to", len(hanging))


class NcclDoor:
    """Implements `Door`: a TCP socket for control connections."""

    name = NAME

    def __init__(self, station: NcclStation, host: str) -> None:
        self.sock, self.port = sockets.listen(host)
        self._station = station

    def check(self, sock: socket.socket) -> None:
        """Send small frames at once. Anybody may connect: the ticket's secret decides."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self, hello: transfer_pb2.Hello, fd: int | None, owner: LinkOwner) -> Greeting:  # noqa: ARG002
        """Offer a communicator; it is up when the sender has joined it."""
        if not hello.in_device:
            raise MismatchError("nccl moves blocks between devices, and the sender's pool lies in none")
        name = self._station.communicators.new_id()
        link = NcclInbound(self._station.device, self._station.communicators, name, owner)
        self._station.keep(link)
        return Greeting(link, name, is_up=False)
