"""How the processes of one cluster know each other: a secret that every call between them carries, and certificates.

`set_up` is called once, when a process starts, as the log's is: whoever serves or calls a peer through common/rpc.py
takes part then. A process that was not set up asks for nothing and shows nothing; only tests and tools run so.
"""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from common.config_doors import SecurityConfig, TlsConfig
from common.errors import ConfigError, UnauthenticatedError
from common.tls import TlsFiles

SECRET_KEY = "baton-cluster-secret"
SECRET_CHARACTERS_MIN = 32
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""Whether a process lives is no secret."""


@dataclass(frozen=True, slots=True)
class Peers:
    """What a process shows to its peers, and asks of them."""

    secret: str = field(default="", repr=False)
    """Printable ASCII; empty: none is shown, and none asked for."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """Encrypts calls."""
    tls_name: str = ""
    """The name in the peers' certificates."""


def load(config: SecurityConfig) -> Peers:
    """Return what a new cluster's processes show to each other.

    Raises:
        ConfigError: the secret's file cannot be read, or holds no fit secret.
    """
    if config.secret_file is None:
        return Peers(secrets.token_hex(32), config.tls, config.tls_name)
    try:
        secret = config.secret_file.expanduser().read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read security.secret_file {config.secret_file}: {error}") from error
    if len(secret) < SECRET_CHARACTERS_MIN or not secret.isprintable() or " " in secret:
        raise ConfigError(
            f"security.secret_file {config.secret_file} must hold at least {SECRET_CHARACTERS_MIN} printable ASCII "
            "characters without spaces; `openssl rand -hex 32` makes such a secret"
        )
    return Peers(secret, config.tls, config.tls_name)


class _Process:
    """This process's own."""

    peers = Peers()
    files: TlsFiles | None = None


def set_up(peers: Peers) -> None:
    """Say how this process meets its peers. Servers that exist already ask for the new secret from now on.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    _Process.files = TlsFiles.of(peers.tls)
    _Process.peers = peers


def tls_files() -> TlsFiles | None:
    """Return this process's certificate for calls to and from peers; None: they are not encrypted."""
    return _Process.files


def current() -> Peers:
    """Return what `set_up` was given last."""
    return _Process.peers


async def admit_peer(method: str, metadata: Mapping[str, str]) -> None:
    """Let a call of this cluster pass.

    Raises:
        UnauthenticatedError: it does not carry the cluster's secret.
    """
    secret = _Process.peers.secret
    if not secret or method.startswith(_OPEN_SERVICES):
        return
    given = metadata.get(SECRET_KEY, "")
    if not hmac.compare_digest(given.encode(), secret.encode()):
        what = "a wrong cluster secret" if given else "no cluster secret"
        raise UnauthenticatedError(f"{what}: this service is for processes of one cluster only")


class PeerChannel(grpc.aio.Channel):
    """A channel whose calls carry the cluster's secret.

    gRPC's own interceptors would put a queue and a task of theirs into every stream.
    """

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._channel: Any = channel  # Any: what the stubs leave out is passed on
        self._metadata = ((SECRET_KEY, secret),)

    async def __aenter__(self) -> Self:
        """Return the channel."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; see grpc.aio.Channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection; see grpc.aio.Channel."""
        state: grpc.ChannelConnectivity = self._channel.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state; see grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait for the connection; see grpc.aio.Channel."""
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Return a method; see grpc.aio.Channel."""
        return _Signed(self._channel.unary_unary(*args, **kwargs), self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return a method; see grpc.aio.Channel."""
        return _Signed(self._channel.unary_stream(*args, **kwargs), self._metadata)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Return a method; see grpc.aio.Channel."""
        return _Signed(self._channel.stream_unary(*args, **kwargs), self._metadata)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Return a method; see grpc.aio.Channel."""
        return _Signed(self._channel.stream_stream(*args, **kwargs), self._metadata)


class _Signed:
    """A method that adds metadata to each call."""

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        return self._method(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)
