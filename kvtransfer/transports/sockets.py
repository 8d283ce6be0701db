"""TCP sockets on the loop, for the transports between hosts."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

BACKLOG = 128


def listen(host: str) -> tuple[socket.socket, int]:
    """Return a listening, non-blocking socket on any free port of `host`, and the port; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock, sock.getsockname()[1]


def keep_to_loopback(port: int) -> bool:
    """Let a listening socket of this process hear the loopback device only; return whether it was found and obeyed.

    For libraries that listen on all addresses and take none: the kernel then drops what comes from other hosts.
    """
    is_kept = False
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                is_kept |= _keep_to_loopback(int(entry.name), port)
    return is_kept


def _keep_to_loopback(fd: int, port: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        is_inet = sock.family in (socket.AF_INET, socket.AF_INET6)
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not (is_inet and is_listening and sock.getsockname()[1] == port):
            return False
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        return True


async def connect(host: str, port: int) -> socket.socket:
    """Return a connected, non-blocking socket that sends small frames at once; raises OSError."""
    infos = await resolve(host, port)
    family, kind, proto, _, address = infos[0]
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


async def resolve(host: str, port: int) -> list[Any]:
    """Return what getaddrinfo does, whose tuples differ by family; raises OSError and nothing else.

    Host and port stand in tickets, which other processes write: a host may be no name at all, and a port too large.
    """
    if not 0 < port < 1 << 16:
        raise OSError(f"{port} is no port")
    try:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except ValueError as error:  # an empty label, or one that is too long
        raise OSError(f"{host!r} is no host name: {error}") from error
