"""What a means of moving blocks has to do to be measured."""

import asyncio
import json
import socket
from typing import Any, Protocol

from kvtransfer.bench.work import Pool

MESSAGE_BYTES_MAX = 64 * 1024 * 1024


class Link:
    """Messages between the two halves of a pair (or a pair and the benchmark), beside what is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, fd: int) -> "Link":
        """Take over one end of a socket pair."""
        sock = socket.socket(fileno=fd)
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=MESSAGE_BYTES_MAX))

    def send(self, message: Any) -> None:
        """Send anything that JSON can say."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: the other side has ended.
        """
        line = await self._reader.readline()
        if not line:
            raise EOFError("the other half of the pair has ended")
        return json.loads(line)


class Side:
    """What a contender is given."""

    def __init__(self, is_sender: bool, pool: Pool, link: Link) -> None:
        self.is_sender = is_sender
        self.pool = pool
        self.work = pool.work
        self.link = link
        self.blocks = self.work.sources() if is_sender else self.work.targets()


class Unavailable(Exception):  # noqa: N818  (not an error: the row says why it is empty)
    """This means cannot be measured here, for the reason in the message."""


class Contender(Protocol):
    """One means; made and connected in both processes."""

    is_shared: bool
    """Whether its pools are memfds, as the engine's are, or private memory with huge pages."""

    def __init__(self, side: Side, option: str) -> None: ...

    async def connect(self) -> None:
        """Set up what a pair sets up once. Both sides; they may use the link.

        Raises:
            Unavailable: what it needs is not here.
        """
        ...

    async def serve(self, order: Any) -> None:
        """Sender: do its part of one transfer, which `fetch` ordered by a message over the link."""
        ...

    async def fetch(self, by_layer: bool) -> None:
        """Receiver: get all source blocks into the target blocks; return when they are in place.

        Args:
            by_layer: in one piece for each layer, as they come out of a forward pass.
        """
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...
