"""The interface of a way to move bytes between one sender and one receiver; one file implements each way.

The control connection, tickets, leases and flow control are the same for all: `kvtransfer.sender` and
`kvtransfer.receiver` own them, and ask a link only to bring pieces across.
"""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from baton_pb.v1 import transfer_pb2
from common.errors import BatonError
from kvtransfer.activity import Stop
from kvtransfer.memory import Memory
from kvtransfer.pieces import Runs


class ByteSender(Protocol):
    """A link that can carry bytes that are not the pool's own, e.g. coded ones."""

    def send_bytes(self, data: memoryview, tag: int) -> asyncio.Future[None]:
        """Start sending `data` as one message, after its Ready frame; see `OutboundLink.send` for tag and result."""
        ...


class ByteReceiver(Protocol):
    """The other half of a `ByteSender`."""

    def receive_bytes(self, buffer: memoryview, tag: int) -> asyncio.Future[None]:
        """Bring one message of just the length of `buffer` into it; done when nothing writes to it any more."""
        ...

    def discard_bytes(self, num_bytes: int, tag: int) -> None:
        """Let a message of a transfer that is over pass by."""
        ...


class OutboundLink(Protocol):
    """The sender's half of a link to one receiver."""

    @property
    def name(self) -> str:
        """The transport, e.g. "shm"."""
        ...

    @property
    def has_checksums(self) -> bool:
        """Whether pieces are verified where the ticket asks for it; both ends of a link say the same."""
        ...

    @property
    def takes_devices(self) -> bool:
        """Whether runs are those of pools in devices, both; else what concerns such a pool travels as messages."""
        ...

    @property
    def byte_sender(self) -> ByteSender | None:
        """The means to carry coded bytes; None: the receiver reads the pool itself, where coding saves nothing."""
        ...

    def send(self, runs: Runs, tag: int) -> asyncio.Future[None] | None:
        """Start sending runs, after their Ready frame.

        Args:
            runs: what to send, in order; a link with a `byte_sender` is given packed ones as a message instead.
            tag: of the first run; run i has tag + i. Not used before and not used again. A link without a
                `byte_sender` has one for all runs.

        Returns:
            Done when the source is not read any more; an exception means that the link is broken. None: the receiver
            fetches the bytes itself, and only its Ack or the end of the transfer matter.
        """
        ...

    def close(self) -> None:
        """Break the link at once: whatever was started comes to an end soon. Any number of times."""
        ...


class StationLink(OutboundLink, Protocol):
    """An `OutboundLink` that notices by itself when the receiver's end is gone."""

    on_broken: Callable[[BatonError], object]
    """Set by whoever owns the control connection."""


class Station(Protocol):
    """A transport between hosts in this process: makes the data channels of senders and receivers."""

    async def connect(self, host: str, extra: bytes, memory: Memory, threads: Executor) -> StationLink:
        """Make the data channel that a receiver's Hello offers.

        Args:
            host: of the receiver.
            extra: what its Hello says to this transport.
            memory: the own pool.
            threads: where copies run.

        Raises:
            WorkerLostError: not reachable.
            TransferError: the offer is malformed.
        """
        ...

    async def close(self) -> None:
        """Break every link, and return when no buffer of ours is used any more."""
        ...


class InboundLink(Protocol):
    """The receiver's half of a link to one sender."""

    @property
    def name(self) -> str:
        """The transport, e.g. "shm"."""
        ...

    @property
    def has_checksums(self) -> bool:
        """Whether pieces are verified where the ticket asks for it; both ends of a link say the same."""
        ...

    @property
    def takes_devices(self) -> bool:
        """Whether runs are those of pools in devices, both; else what concerns such a pool travels as messages."""
        ...

    @property
    def byte_receiver(self) -> ByteReceiver | None:
        """The other half of the sender's `byte_sender`."""
        ...

    def receive(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        """Bring runs into the pool.

        Args:
            runs: checked against both pools.
            tag: as for `OutboundLink.send`.
            checksum: whether to hash what arrived.
            stop: the result is not wanted any more; end early if possible.

        Returns:
            Done when nothing writes to the targets any more: xxh3_64 of the bytes, None without checksum, or an
            exception.
        """
        ...

    def probe(self, num_bytes: int, tag: int) -> asyncio.Future[None]:
        """Bring the first bytes of the sender's pool into memory of no meaning, to see how long it takes."""
        ...

    def discard(self, runs: Runs, tag: int) -> None:
        """Let runs of a transfer that is over pass by without writing them anywhere."""
        ...

    def close(self) -> None:
        """Break the link at once: whatever was started comes to an end soon. Any number of times."""
        ...


class LinkOwner(Protocol):
    """The connection that a link belongs to, as the link sees it."""

    def link_is_up(self) -> None:
        """Let pieces pass."""
        ...

    def lose(self, error: BatonError) -> None:
        """End the connection, because the link is broken."""
        ...


class Greeting(NamedTuple):
    """What the door of a transport makes of a sender's Hello."""

    link: InboundLink
    extra: bytes
    """For the answer."""
    is_up: bool
    """False: `LinkOwner.link_is_up` follows when pieces can pass."""


class Door(Protocol):
    """Where senders of one transport knock."""

    @property
    def name(self) -> str:
        """The transport."""
        ...

    @property
    def sock(self) -> socket.socket:
        """Listening, non-blocking."""
        ...

    def check(self, sock: socket.socket) -> None:
        """Refuse a connection by what the kernel says of its peer; raises a `BatonError`."""
        ...

    def greet(self, hello: transfer_pb2.Hello, fd: int | None, owner: LinkOwner) -> Greeting:
        """Make the link; closes `fd`. Raises a `BatonError` to refuse."""
        ...
