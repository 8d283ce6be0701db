"""The gRPC server of a worker process, and the channel options with which workers call each other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import ConfigError, DeadlineError

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Largest message: a prompt of a million tokens is 4 MB, its ticket less."""

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Two servers never share a port by accident.
    ("grpc.so_reuseport", 0),
    # Watch streams and long prompts are quiet for long: answer pings, also without calls, and do not count them as
    # abuse ("too many pings").
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # A gateway whose host vanished is noticed in about as long as a missed heartbeat.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A peer whose host vanished in the middle of a call is noticed in two seconds and a half.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_500),
    # Without this one the core waits a minute for the answer to a ping, whatever the keepalive timeout says.
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker that is restarted under its old address is found again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels of one process to one address must not share a broken connection with a channel that replaces them.
    ("grpc.use_local_subchannel_pool", 1),
)


class RpcServer(NamedTuple):
    """A server with its health service. Add services, then `start`."""

    server: grpc.aio.Server
    health: Any  # health.aio.HealthServicer, which the stubs lack
    address: str

    @classmethod
    def bind(cls, host: str, port: int = 0) -> "RpcServer":
        """Take a port; 0: any free one.

        Raises:
            ConfigError: the address cannot be had.
        """
        server = grpc.aio.server(options=list(SERVER_OPTIONS))
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}") from error
        if bound == 0:
            raise ConfigError(f"cannot listen on {host}:{port}")
        return cls(server, servicer, f"{host}:{bound}")

    async def start(self) -> None:
        """Serve, and say so to the health service."""
        await self.server.start()
        await self.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        """Change what the health service answers."""
        status = health_pb2.HealthCheckResponse
        await self.health.set("", status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        await self.health.enter_graceful_shutdown()
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
