"""TCP sockets on the loop, for the transports between hosts."""

import asyncio
import socket
from typing import Any

BACKLOG = 128


def listen(host: str) -> tuple[socket.socket, int]:
    """Return a listening, non-blocking socket on any free port of `host`, and the port; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock, sock.getsockname()[1]


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
