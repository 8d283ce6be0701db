"""Entry of the actor that hosts the gateway."""

import asyncio
from pathlib import Path

from cluster.gateway.server import GatewayServer
from cluster.supervisor.fleet import PROBE
from common.config_doors import GatewayConfig


class HostedGateway:
    """A GatewayServer as a hosted service."""

    def __init__(self, server: GatewayServer) -> None:
        self._server = server

    def addresses(self) -> dict[str, str]:
        """Return where it listens."""
        probe = {} if self._server.probe_address is None else {PROBE: self._server.probe_address}
        return {"grpc": self._server.grpc_address, "http": self._server.http_address, **probe}

    async def wait_failed(self) -> None:
        """Never return: requests fail one by one; a dead process is seen by its supervisor."""
        await asyncio.Event().wait()

    async def stop(self, drain_timeout_s: float) -> None:
        """Take no new requests, finish the running ones for so long at most, close."""
        await self._server.stop(drain_timeout_s)


async def open_gateway(
    host: str, config: GatewayConfig, model_dir: Path, model_id: str, router_address: str
) -> HostedGateway:
    """Serve clients. The gateway's own config says where; `host` is what its actor would take otherwise."""
    del host
    return HostedGateway(await GatewayServer.start(config, model_dir, model_id, router_address))
