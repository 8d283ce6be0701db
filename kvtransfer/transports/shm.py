"""Shared memory on one host: the receiver maps the sender's pool read-only and copies announced blocks into place.

The sender passes its pool's memfd (opened anew for reading only) with its Hello over an abstract Unix socket: a name
that the kernel keeps for each network namespace and forgets with its last descriptor, so nothing is left behind.
Only processes of the same user are spoken to.
"""

import asyncio
import mmap
import os
import secrets
import socket
import struct
from concurrent.futures import Executor
from pathlib import Path

from baton_pb.v1 import transfer_pb2
from common.errors import UnauthenticatedError
from kvtransfer.activity import Stop
from kvtransfer.memory import Memory, checksum_of, copy_runs
from kvtransfer.pieces import Run, Runs
from kvtransfer.probe import scratch
from kvtransfer.transports.base import Greeting, LinkOwner
from kvtransfer.wire import FrameError

NAME = "shm"
BACKLOG = 128
CHECKSUMS = b"checksums"
"""What the receiver's Hello says if it wants to verify what it copies."""
_UCRED = struct.Struct("iII")


def host_id() -> str:
    """Return a name that two processes share if one can reach the other's abstract sockets: boot id, net namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


def listen() -> tuple[socket.socket, str]:
    """Return a listening socket and its path for tickets ("@" stands for the zero byte of abstract names)."""
    path = f"@baton-{secrets.token_hex(12)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.bind(_address(path))
    sock.listen(BACKLOG)
    return sock, path


async def connect(path: str) -> socket.socket:
    """Return a connected socket.

    Raises:
        OSError: nobody listens there, or not in this namespace.
        UnauthenticatedError: another user's process listens there.
    """
    if not path.startswith("@"):
        raise OSError(f"not an abstract socket: {path!r}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, _address(path))
        require_same_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def require_same_user(sock: socket.socket) -> None:
    """Refuse a peer that runs as somebody else.

    Raises:
        UnauthenticatedError: naming both user ids.
    """
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise UnauthenticatedError(f"the peer runs as user {uid}, this worker as {os.geteuid()}")


def read_only(memfd: int) -> int:
    """Return a new descriptor of the same memory that cannot be mapped for writing; the caller closes it."""
    return os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)


def map_pool(fd: int | None, num_bytes: int) -> Memory:
    """Map a peer's pool and close its descriptor. The mapping ends with the last reference to the result.

    Reading past a file that shrinks kills the reader; pools never shrink, and a process of the same user could kill
    this one anyway.

    Raises:
        FrameError: no descriptor, or one of too little memory.
    """
    if fd is None:
        raise FrameError("no memory was passed with Hello")
    try:
        size = os.fstat(fd).st_size
        if num_bytes == 0 or size < num_bytes:
            raise FrameError(f"the memory passed with Hello has {size} bytes, {num_bytes} were declared")
        return Memory(memoryview(mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)))
    except OSError as error:
        raise FrameError(f"what was passed with Hello cannot be mapped: {error}") from error
    finally:
        os.close(fd)


class ShmDoor:
    """Implements `Door`."""

    name = NAME

    def __init__(self, target: Memory, threads: Executor, block_bytes: int, has_checksums: bool) -> None:
        self.sock, self.path = listen()
        self._target = target
        self._threads = threads
        self._block_bytes = block_bytes
        self._has_checksums = has_checksums

    def check(self, sock: socket.socket) -> None:
        """Refuse other users."""
        require_same_user(sock)

    def greet(self, hello: transfer_pb2.Hello, fd: int | None, owner: LinkOwner) -> Greeting:  # noqa: ARG002  (up at once)
        """Map the sender's pool."""
        source = map_pool(fd, hello.num_blocks * self._block_bytes)
        link = ShmInbound(source, self._target, self._threads, self._has_checksums)
        return Greeting(link, CHECKSUMS if self._has_checksums else b"", is_up=True)


class ShmOutbound:
    """Implements `OutboundLink`: there is nothing to do, the receiver reads.

    Args:
        extra: of the receiver's Hello.
    """

    name = NAME
    byte_sender = None
    takes_devices = False

    def __init__(self, extra: bytes) -> None:
        self.has_checksums = extra == CHECKSUMS

    def send(self, runs: Runs, tag: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ShmInbound:
    """Implements `InboundLink`: copies in a thread, out of the sender's pool, which may outlive the sender.

    Args:
        source: the sender's pool.
        target: the own pool.
        threads: where copies run.
        has_checksums: whether to verify on demand. No wire can damage bytes here, so that it costs more than it shows.
    """

    name = NAME
    byte_receiver = None
    takes_devices = False

    def __init__(self, source: Memory, target: Memory, threads: Executor, has_checksums: bool) -> None:
        self.has_checksums = has_checksums
        self._source: Memory | None = source
        self._target = target
        self._threads = threads

    def receive(
        self,
        runs: Runs,
        tag: int,  # noqa: ARG002
        checksum: bool,
        stop: Stop,
    ) -> asyncio.Future[int | None]:
        """Copy and hash; see `InboundLink.receive`."""
        assert self._source is not None
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, _copy, self._source, self._target, runs, checksum, stop)

    def probe(self, num_bytes: int, tag: int) -> asyncio.Future[None]:  # noqa: ARG002
        """Copy; see `InboundLink.probe`."""
        assert self._source is not None
        target, runs = Memory(scratch(num_bytes)), Runs.of([Run(0, 0, num_bytes)])
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, copy_runs, self._source, target, runs, Stop())

    def discard(self, runs: Runs, tag: int) -> None:
        """Do nothing: unread memory needs no attention."""

    def close(self) -> None:
        """Let go of the mapping; copies under way hold their own reference and are short."""
        self._source = None


def _copy(source: Memory, target: Memory, runs: Runs, checksum: bool, stop: Stop) -> int | None:
    copy_runs(source, target, runs, stop)
    return checksum_of(target, runs.targets, runs.sizes, stop) if checksum else None


def _address(path: str) -> bytes:
    return b"\0" + path[1:].encode()
