"""Finds processes that live but do not answer. Ray reports a dead one within milliseconds and a hung one never."""

import asyncio
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import SupervisorConfig
from common.rpc import open_channel


class Prober(Protocol):
    """Watches one address."""

    async def hung(self, address: str) -> str:
        """Wait until the service there does not answer any more, and return the reason."""
        ...


class HealthProber:
    """Asks the standard health service at intervals. Whatever answers, even with an error, is alive."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._interval_s = config.probe_interval_s
        self._timeout_s = config.probe_timeout_s
        self._misses_max = config.probe_misses_max

    async def hung(self, address: str) -> str:
        """Return after `probe_misses_max` checks in a row without an answer; a slow process has that much time."""
        misses = 0
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while misses < self._misses_max:
                await asyncio.sleep(self._interval_s)  # the period of the checks; nothing is waited for
                misses = 0 if await self._answers(stub) else misses + 1
        return f"no answer to {misses} health checks in a row"

    async def _answers(self, stub: health_pb2_grpc.HealthStub) -> bool:
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True
