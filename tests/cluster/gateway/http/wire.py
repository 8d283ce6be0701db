"""HTTP as it is on the wire: requests byte by byte, and connections that a test holds in its hand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.cluster.fake_cluster import LIMIT_S, FakeCluster


@dataclass(frozen=True, slots=True)
class Response:
    """All of an answer that has a length."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["code"], str | None)
        return error


def request_bytes(path: str, body: object = None, method: str = "POST", **headers: str) -> bytes:
    """Return a request; a body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"host": "test", "content-length": str(len(data))} | {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode() + data


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, path: str, body: object = None, method: str = "POST", **headers: str) -> None:
        """Send a request; see `request_bytes`."""
        self.writer.write(request_bytes(path, body, method, **headers))

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read a response's status and headers."""
        async with asyncio.timeout(LIMIT_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def response(self) -> Response:
        """Read a whole answer."""
        status, headers = await self.head()
        async with asyncio.timeout(LIMIT_S):
            return Response(status, headers, await self.reader.readexactly(int(headers["content-length"])))

    async def chunk(self) -> bytes:
        """Read one chunk of an answer without a length; empty at its end."""
        async with asyncio.timeout(LIMIT_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def rest(self) -> list[str]:
        """Read chunks up to the end; return their events and comments."""
        data = b""
        while part := await self.chunk():
            data += part
        assert data.endswith(b"\n\n")
        return data.decode().removesuffix("\n\n").split("\n\n")

    async def is_closed(self) -> bool:
        """Wait for the other side to close."""
        async with asyncio.timeout(LIMIT_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True

    def cut(self) -> None:
        """Leave without a word."""
        self.writer.transport.abort()


@asynccontextmanager
async def wire(cluster: FakeCluster) -> AsyncIterator[Wire]:
    """Connect to the gateway's HTTP port."""
    host, _, port = cluster.gateway.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def post(cluster: FakeCluster, path: str, body: object, **headers: str) -> Response:
    """Send one request on a connection of its own."""
    async with wire(cluster) as connection:
        connection.send(path, body, **headers)
        return await connection.response()


async def get(cluster: FakeCluster, path: str, method: str = "GET", **headers: str) -> Response:
    """Fetch a path."""
    async with wire(cluster) as connection:
        connection.send(path, None, method, **headers)
        return await connection.response()


def event(text: str) -> dict[str, Any]:
    """Return an event's JSON."""
    assert text.startswith("data: ")
    value: dict[str, Any] = json.loads(text.removeprefix("data: "))
    return value
