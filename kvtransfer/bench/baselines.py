"""The limits: a copy inside one process, and plain sockets in the same layout."""

import ctypes
import socket
from typing import Any

from kvtransfer.bench.contender import Side

IOV_MAX = 1024


class InProcess:
    """Implements `Contender`: memcpy, block by block, out of another pool of the same process."""

    is_shared = True

    def __init__(self, side: Side, option: str) -> None:  # noqa: ARG002
        self._side = side
        self._source = side.pool

    async def connect(self) -> None:
        """Make the second pool."""
        if not self._side.is_sender:
            self._source = type(self._side.pool)(self._side.work, self.is_shared)
            self._source.fill()

    async def serve(self, order: Any) -> None:
        """Nothing to do."""

    async def fetch(self, by_layer: bool) -> None:
        """Copy."""
        work, source, target = self._side.work, self._source.address, self._side.pool.address
        pairs = list(zip(work.offsets(work.sources()), work.offsets(work.targets()), strict=True))
        size, memmove = work.layout.block_bytes, ctypes.memmove
        if by_layer:
            size = work.layout.layer_bytes
            pairs = [(s + at, t + at) for at in range(0, work.layout.block_bytes, size) for s, t in pairs]
        for begin, end in pairs:
            memmove(target + end, source + begin, size)

    async def close(self) -> None:
        """Nothing to do."""


class InProcessHuge(InProcess):
    """The same with huge pages, which shared pools get where the kernel allows it."""

    is_shared = False


class RawTcp:
    """Implements `Contender`: blocking sockets, scattered and gathered by the kernel, nothing verified.

    In memory of the kind that the engine's pools are made of, so that the difference to ours is what we add.
    """

    is_shared = True

    def __init__(self, side: Side, option: str) -> None:  # noqa: ARG002
        self._side = side
        self._sock: socket.socket

    async def connect(self) -> None:
        """Connect over loopback."""
        if self._side.is_sender:
            with socket.create_server(("127.0.0.1", 0)) as door:
                self._side.link.send(door.getsockname()[1])
                self._sock, _ = door.accept()
        else:
            self._sock = socket.create_connection(("127.0.0.1", await self._side.link.receive()))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def serve(self, order: Any) -> None:
        """Send all blocks."""
        for part in self._parts(order):
            while part:
                part = _rest(part, self._sock.sendmsg(part[:IOV_MAX]))

    async def fetch(self, by_layer: bool) -> None:
        """Receive them in place."""
        self._side.link.send(by_layer)
        for part in self._parts(by_layer):
            while part:
                received = self._sock.recvmsg_into(part[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
                if not received:
                    raise EOFError("the sender has ended")
                part = _rest(part, received)

    async def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _parts(self, by_layer: bool) -> list[list[memoryview]]:
        """Return the buffers of one transfer, or of each layer."""
        layout, view = self._side.work.layout, self._side.pool.store.buffer
        size = layout.layer_bytes if by_layer else layout.block_bytes
        begins = self._side.work.offsets(self._side.blocks)
        return [[view[b + at : b + at + size] for b in begins] for at in range(0, layout.block_bytes, size)]


def _rest(part: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of buffers of which `done` bytes are through."""
    for i, buffer in enumerate(part):
        if done < len(buffer):
            return [buffer[done:], *part[i + 1 :]]
        done -= len(buffer)
    return []
