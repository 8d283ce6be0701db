"""Entry of the actor that hosts the router."""

import asyncio

from cluster.router.server import RouterServer
from common.config import RouterConfig


class HostedRouter:
    """A RouterServer as a hosted service."""

    def __init__(self, server: RouterServer) -> None:
        self._server = server

    def addresses(self) -> dict[str, str]:
        """Return where it listens."""
        return {"grpc": self._server.address}

    async def wait_failed(self) -> None:
        """Never return: the router's tasks log and go on; a dead process is seen by its supervisor."""
        await asyncio.Event().wait()

    async def stop(self, drain_timeout_s: float) -> None:  # noqa: ARG002 - HostedService's signature
        """Close it; a router has nothing to drain."""
        await self._server.stop()


async def open_router(host: str, port: int, config: RouterConfig, heartbeat_s: float) -> HostedRouter:
    """Serve placements on host:port (0: any free port)."""
    return HostedRouter(await RouterServer.start(host, port, config, heartbeat_s))
