"""The limits: a copy inside one process, and plain sockets in the same layout."""

import ctypes
import socket
from typing import Any

import xxhash

from kvtransfer.activity import Stop
from kvtransfer.bench.contender import Side
from kvtransfer.memory import Memory, copy_runs
from kvtransfer.native import library
from kvtransfer.pieces import PIECE_BYTES_MAX, Piece, runs_of
from kvtransfer.transports.shm import map_pool, read_only

IOV_MAX = 1024
CHECKSUMS = "checksums"
DIGEST_BYTES = 64
"""Padded, so that what follows stays in line with memory, as ours does: see `tcp_piece.HEADER`."""


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


class MappedCopy(InProcess):
    """Our copy of shared memory without a process or a message between: out of a read-only mapping of a memfd."""

    async def connect(self) -> None:
        """Make the second pool and map it once more."""
        await super().connect()
        library()
        if not self._side.is_sender:
            memfd = self._source.store.memfd
            assert memfd is not None
            self._mapped = map_pool(read_only(memfd), self._source.bytes.nbytes)

    async def fetch(self, by_layer: bool) -> None:
        """Copy, in one call or one for each layer."""
        work = self._side.work
        layers = range(work.layout.num_layers)
        target, everything = Memory(self._side.pool.store.buffer), Piece(0, tuple(work.sources()), layers)
        for piece in [everything._replace(layers=range(i, i + 1)) for i in layers] if by_layer else [everything]:
            copy_runs(self._mapped, target, runs_of(piece, work.targets(), work.layout), Stop())


class RawTcp:
    """Implements `Contender`: blocking sockets, scattered and gathered by the kernel.

    In memory of the kind that the engine's pools are made of, so that the difference to ours is what we add. With the
    option `CHECKSUMS` each half also hashes what it sends or got, as ours do: after a part, before the next.
    """

    is_shared = True

    def __init__(self, side: Side, option: str) -> None:
        self._side = side
        self._has_checksums = option == CHECKSUMS
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
            left = [*part, _digest(part)] if self._has_checksums else part
            while left:
                left = _rest(left, self._sock.sendmsg(left[:IOV_MAX]))

    async def fetch(self, by_layer: bool) -> None:
        """Receive them in place."""
        self._side.link.send(by_layer)
        for part in self._parts(by_layer):
            digest = memoryview(bytearray(DIGEST_BYTES))
            left = [*part, digest] if self._has_checksums else part
            while left:
                received = self._sock.recvmsg_into(left[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
                if not received:
                    raise EOFError("the sender has ended")
                left = _rest(left, received)
            if self._has_checksums and digest != _digest(part):
                raise EOFError("a wrong checksum")

    async def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _parts(self, by_layer: bool) -> list[list[memoryview]]:
        """Return the buffers of each part: a layer, or as many blocks as a piece of ours has."""
        layout, view = self._side.work.layout, self._side.pool.store.buffer
        begins = self._side.work.offsets(self._side.blocks)
        if by_layer:
            size = layout.layer_bytes
            return [[view[b + at : b + at + size] for b in begins] for at in range(0, layout.block_bytes, size)]
        size = layout.block_bytes
        count = max(1, PIECE_BYTES_MAX // size) if self._has_checksums else len(begins)
        return [[view[b : b + size] for b in begins[at : at + count]] for at in range(0, len(begins), count)]


def _digest(part: list[memoryview]) -> memoryview:
    digest = xxhash.xxh3_64()
    for buffer in part:
        digest.update(buffer)
    return memoryview(digest.digest().ljust(DIGEST_BYTES, b"\0"))


def _rest(part: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of buffers of which `done` bytes are through."""
    for i, buffer in enumerate(part):
        if done < len(buffer):
            return [buffer[done:], *part[i + 1 :]]
        done -= len(buffer)
    return []
