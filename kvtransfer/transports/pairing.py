"""A data channel beside a control connection: offered in the receiver's Hello, tied to it by a token."""

import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Generic, Protocol, TypeVar

from baton_pb.v1 import transfer_pb2
from common.errors import TransferError
from kvtransfer.memory import Memory
from kvtransfer.transports import sockets
from kvtransfer.transports.base import Greeting, InboundLink, LinkOwner

TOKEN_BYTES = 64
UNPAIRED_MAX = 64
"""Channels that have not shown their token yet, beyond which further ones are turned away."""
_OFFER = struct.Struct(f"<H{TOKEN_BYTES}s")


class Channelled(Protocol):
    """A link with a data channel."""

    on_closed: Callable[[], object]

    def close(self) -> None:
        """Break it."""
        ...


class InboundChannelled(Channelled, InboundLink, Protocol):
    """The receiver's half of one."""


L = TypeVar("L", bound=InboundChannelled)
L_contra = TypeVar("L_contra", bound=InboundChannelled, contravariant=True)


class Pairing(Generic[L]):
    """The links of one station, and the receivers' halves whose channel has not come yet. Owned by the loop."""

    def __init__(self) -> None:
        self._links: set[Channelled] = set()
        self._expected: dict[bytes, L] = {}

    def keep(self, link: Channelled) -> None:
        """Know a link until it is closed."""
        self._links.add(link)
        link.on_closed = partial(self._links.discard, link)

    def offer(self, port: int, link: L) -> bytes:
        """Expect a link's channel; return what its sender needs to reach it: port and token."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = link
        self._links.add(link)
        link.on_closed = partial(self._forget, link, token)
        return _OFFER.pack(port, token)

    def claim(self, token: bytes) -> L | None:
        """Return the link whose channel shows this token, once."""
        return self._expected.pop(token, None)

    def close(self) -> None:
        """Break all links."""
        for link in list(self._links):
            link.close()

    def _forget(self, link: L, token: bytes) -> None:
        self._expected.pop(token, None)
        self._links.discard(link)


def read_offer(extra: bytes, transport: str) -> tuple[int, bytes]:
    """Return port and token of a receiver's offer.

    Raises:
        TransferError: it is malformed.
    """
    if len(extra) != _OFFER.size:
        raise TransferError(f"the receiver's Hello does not offer {transport}")
    port, token = _OFFER.unpack(extra)
    return port, token


class Station(Protocol[L_contra]):
    """Where a transport's data channels arrive."""

    def expect(self, link: L_contra) -> bytes:
        """Return what a sender needs to reach `link`."""
        ...


class ChannelDoor(ABC, Generic[L]):
    """Implements `Door`: a TCP socket for control connections. Subclasses name the transport and make its links."""

    name: str

    def __init__(self, station: Station[L], host: str, target: Memory, threads: Executor) -> None:
        self.sock, self.port = sockets.listen(host)
        self._station = station
        self._target = target
        self._threads = threads

    @abstractmethod
    def _link(self, owner: LinkOwner) -> L:
        """Return the receiver's half of a new link."""

    def check(self, sock: socket.socket) -> None:
        """Send small frames at once. Anybody may connect: the ticket's secret decides."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self, hello: transfer_pb2.Hello, fd: int | None, owner: LinkOwner) -> Greeting:  # noqa: ARG002
        """Offer a data channel; it is up when the sender has shown the token on it."""
        link = self._link(owner)
        return Greeting(link, self._station.expect(link), is_up=False)
