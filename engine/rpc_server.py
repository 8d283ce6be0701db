"""The gRPC server of a worker process, and the deadline of a call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc.aio

from common.errors import DeadlineError
from common.rpc import Health, bind, make_server


class RpcServer(NamedTuple):
    """A server with its health service. Add services, then `start`."""

    server: grpc.aio.Server
    health: Health
    address: str

    @classmethod
    def bind(cls, host: str, port: int = 0) -> "RpcServer":
        """Take a port; 0: any free one.

        Raises:
            ConfigError: the address cannot be had.
        """
        server = make_server()
        return cls(server, Health(server), bind(server, host, port))

    async def start(self) -> None:
        """Serve, and say so to the health service."""
        await self.server.start()
        await self.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        """Change what the health service answers."""
        await self.health.set_serving(is_serving, [""])

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        await self.health.close()
        await self.server.stop(grace_s)


@asynccontextmanager
async def deadline(timeout_s: float) -> AsyncIterator[None]:
    """Limit the time of what is inside; 0: no limit.

    Raises:
        DeadlineError: the time is over; what was inside was cancelled.
    """
    try:
        async with asyncio.timeout(timeout_s or None) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineError(f"the request's deadline passed, {timeout_s:.3f} s after it reached this worker") from error
