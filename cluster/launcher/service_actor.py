"""The one Ray actor class: it hosts one service (a worker, the router or the gateway) in a process of its own.

What it hosts is named by an entry string and imported inside the actor, so that the process which starts it needs
neither torch nor anything else that only the service uses.
"""

import asyncio
import gc
import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from cluster.launcher import processes
from common import logs, peers


class Started(NamedTuple):
    """Where a service runs and listens."""

    address: str
    """host:port of its gRPC server."""
    node: str
    """IP address of the Ray node it runs on."""
    pid: int
    """Of the process, on that node."""
    extra: dict[str, str] = {}
    """Further addresses by name, e.g. `http`."""


class HostedService(Protocol):
    """What an entry function returns; see worker_actor, router_actor, gateway_actor."""

    def addresses(self) -> dict[str, str]:
        """Return where it listens, by name; `grpc` is always there."""
        ...

    async def wait_failed(self) -> None:
        """Return or raise when the service has died; else never."""
        ...

    async def stop(self, drain_timeout_s: float) -> None:
        """Finish what runs, for so long at most, and close everything."""
        ...


class ServiceActor:
    """Hosts one service. All methods run on the actor's own asyncio loop, which the service shares."""

    def __init__(self, name: str, log_level: str, how: peers.Peers) -> None:
        processes.die_with_parent()
        logs.set_up(name, log_level)
        peers.set_up(how)
        self._name = name
        self._service: HostedService | None = None
        self._stopped = asyncio.Event()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before each line of the log

    async def start(self, entry: str, host: str | None, arguments: Mapping[str, Any]) -> Started:
        """Import and start the service.

        Args:
            entry: `module:function`; an async function of host and arguments that returns a HostedService.
            host: address to listen on; None: this node's own.
            arguments: passed on.

        Raises:
            BatonError: from the service; nothing runs then.
        """
        assert self._service is None, "an actor hosts one service for its whole life"
        import ray

        node = host or str(ray.util.get_node_ip_address())
        module, _, function = entry.partition(":")
        opener = getattr(importlib.import_module(module), function)
        service: HostedService = await opener(host=node, **arguments)
        self._service = service
        # What is here now stays. A full collection would look through all of it, 0.1 s in a worker, with every stream
        # standing still.
        gc.collect()
        gc.freeze()
        addresses = service.addresses()
        return Started(addresses.pop("grpc"), node, os.getpid(), addresses)

    async def wait_failed(self) -> None:
        """Return or raise when the service has died. Pending as long as all is well: its end tells the supervisor."""
        assert self._service is not None
        # It also returns at an orderly end: Ray does not let a process go that has a call pending.
        waits = [asyncio.ensure_future(self._service.wait_failed()), asyncio.ensure_future(self._stopped.wait())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self, drain_timeout_s: float) -> None:
        """Stop the service in order; end the process with `leave` afterwards."""
        try:
            if self._service is not None:
                await self._service.stop(drain_timeout_s)
        finally:
            self._stopped.set()

    async def leave(self) -> None:
        """End this process in order. The caller sees an ActorDiedError."""
        import ray

        ray.actor.exit_actor()
