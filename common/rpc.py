"""gRPC settings of all our processes: servers that do not mind quiet streams, channels that notice a lost peer."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common import peers
from common.errors import ConfigError
from common.rpc_guard import Guard
from common.tls import TlsFiles, channel_credentials, server_credentials

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""Largest message between our own processes: a snapshot of a million blocks has 18 MB."""

Options = list[tuple[str, int]]
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def is_address(text: str) -> bool:
    """Whether `text` is HOST:PORT, with a port that one can connect to. Whether the host exists is not looked up."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65536


METADATA_BYTES_MAX = 16 * 1024
"""Largest headers of a call between our own processes."""


class ClientLimits(NamedTuple):
    """Limits for connections of clients that are no processes of ours."""

    connections_max: int
    """Beyond it a further one is closed."""
    arrival_s: float
    """How long a connection may take until both sides can use it."""
    idle_s: float
    """How long one may stay open without a call."""

    def options(self) -> Options:
        """Return the server's options."""
        return [
            # Else a stream may send up to 128 MB that nobody asks for. Who waits for a message has room made for it.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_allowed_incoming_connections", self.connections_max),
            ("grpc.server_handshake_timeout_ms", _milliseconds(self.arrival_s)),
            ("grpc.max_connection_idle_ms", _milliseconds(self.idle_s)),
        ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def make_server(
    guard: Guard | None = None,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    metadata_bytes_max: int = METADATA_BYTES_MAX,
    clients: "ClientLimits | None" = None,
) -> grpc.aio.Server:
    """Return a server whose calls are guarded, see rpc_guard.py.

    Args:
        guard: stands before each call; one that admits peers unless given.
        message_bytes_max: a larger message ends its call with RESOURCE_EXHAUSTED.
        metadata_bytes_max: as much for the headers of a call.
        clients: limits for connections of strangers; None: none.
    """
    options = [*server_options(message_bytes_max), *_metadata_options(metadata_bytes_max)]
    if clients is not None:
        options += clients.options()
    server = grpc.aio.server(interceptors=[guard or Guard(peers.admit_peer)], options=options)
    # A server waits for each registered method by a task of its own, and looks at all of them for each call that comes.
    # Services are found by their names as well.
    server.add_registered_method_handlers = lambda *_: None  # type: ignore[attr-defined]  # the stubs lack it
    return server


def _metadata_options(most: int) -> Options:
    # Between the two the core refuses at random; one number is clearer.
    return [("grpc.max_metadata_size", most), ("grpc.absolute_max_metadata_size", most)]


def server_options(message_bytes_max: int = MESSAGE_BYTES_MAX) -> Options:
    """Return the options of a server."""
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        # Channelz would tell every caller of every other one's connections, and costs time and memory for each call.
        ("grpc.enable_channelz", 0),
        # Two servers never share a port by accident.
        ("grpc.so_reuseport", 0),
        # Clients may ping a quiet stream as often as they like: no "too many pings".
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # A client whose host vanished is noticed.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options() -> Options:
    """Return the options of a channel to one of our own processes."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.enable_channelz", 0),
        # A peer whose host vanished in the middle of a stream is noticed in two seconds and a half.
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_timeout_ms", 1_500),
        # Without this one the core waits a minute for the answer to a ping, whatever the keepalive timeout says.
        ("grpc.http2.ping_timeout_ms", 1_500),
        ("grpc.http2.max_pings_without_data", 0),
        # A process that is restarted under its old address is found again at once.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A channel never inherits a broken connection from the one before it.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to one of our own processes."""
    secret, files = peers.current().secret, peers.tls_files()
    if files is None:
        channel = grpc.aio.insecure_channel(address, options=channel_options())
    else:
        name = ("grpc.ssl_target_name_override", peers.current().tls_name)
        options: list[tuple[str, Any]] = [*channel_options(), name]
        channel = grpc.aio.secure_channel(address, channel_credentials(files), options=options)
    return peers.PeerChannel(channel, secret) if secret else channel


def bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Take a port for peers (0: any free one) and return the address.

    Raises:
        ConfigError: the port cannot be had.
    """
    return bind_with(peers.tls_files(), server, host, port)


def bind_with(files: TlsFiles | None, server: grpc.aio.Server, host: str, port: int) -> str:
    """Take a port (0: any free one) for whoever comes, with this certificate, and return the address.

    Raises:
        ConfigError: the port cannot be had.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if files is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, server_credentials(files))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: is the port taken?") from error
    if bound == 0:
        raise ConfigError(f"cannot listen on {host}:{port}: is the port taken?")
    return f"{address.rpartition(':')[0]}:{bound}"


class Health:
    """The standard health service of one server."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, is_serving: bool, names: Sequence[str]) -> None:
        """Change the answer for these services; "" is the server as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names:
            await self._servicer.set(name, status)

    async def close(self) -> None:
        """Answer NOT_SERVING for good."""
        await self._servicer.enter_graceful_shutdown()
