"""Certificates: read from files, again whenever these have changed, for gRPC and for plain sockets.

Nothing watches the files: whoever begins a connection looks at them. New connections have the new certificate, old ones
keep theirs.
"""

import logging
import ssl
import threading
from typing import Any, NamedTuple

import grpc

from common.config_doors import TlsConfig
from common.errors import ConfigError
from common.logs import log

_LOG = logging.getLogger(__name__)
_MINIMUM = ssl.TLSVersion.TLSv1_2


class Pem(NamedTuple):
    """What the files hold."""

    chain: bytes
    key: bytes
    ca: bytes | None
    """Whom the other side must be certified by."""


class _Loaded(NamedTuple):
    states: tuple[tuple[int, int, int], ...]
    pem: Pem
    context: ssl.SSLContext
    """Of a server."""


class TlsFiles:
    """One certificate's files. May be used by any thread.

    Files that go bad, or do not fit each other because one of them is replaced just now, change nothing until they do;
    the log says so once.
    """

    def __init__(self, config: TlsConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: one cannot be read, or key and certificate do not belong together.
        """
        assert config.cert_file is not None
        assert config.key_file is not None
        self._paths = [config.cert_file.expanduser(), config.key_file.expanduser()]
        if config.ca_file is not None:
            self._paths.append(config.ca_file.expanduser())
        # gRPC asks on threads of its own. Held while three small files are read.
        self._lock = threading.Lock()
        self._loaded = self._read()
        self._seen = self._loaded.states

    @classmethod
    def of(cls, config: TlsConfig) -> "TlsFiles | None":
        """Return the files that a configuration names; None: nothing is to be encrypted.

        Raises:
            ConfigError: as above.
        """
        return cls(config) if config.is_on else None

    def pem(self) -> Pem:
        """Return what the files hold now."""
        return self._current().pem

    def context(self) -> ssl.SSLContext:
        """Return a server's context with what the files hold now."""
        return self._current().context

    def _current(self) -> _Loaded:
        with self._lock:
            states = self._states()
            if states != self._seen:
                self._seen = states
                try:
                    self._loaded = self._read()
                except ConfigError as error:
                    log(_LOG, logging.ERROR, f"the certificate stays as it was: {error.message}")
                else:
                    log(_LOG, logging.INFO, "certificate read again", file=self._paths[0])
            return self._loaded

    def _states(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return ()
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)

    def _read(self) -> _Loaded:
        states = self._states()
        try:
            chain, key, *rest = (path.read_bytes() for path in self._paths)
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=rest[0].decode() if rest else None)
            context.minimum_version = _MINIMUM
            context.verify_mode = ssl.CERT_REQUIRED if rest else ssl.CERT_NONE
            context.load_cert_chain(self._paths[0], self._paths[1])
        except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError is an OSError
            names = ", ".join(map(str, self._paths))
            raise ConfigError(f"cannot use the certificate in {names}: {error}") from error
        return _Loaded(states, Pem(chain, key, rest[0] if rest else None), context)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials of a gRPC server; each new connection is shown the files' certificate of that moment."""

    def configuration() -> Any:
        pem = files.pem()
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.ca)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, files.pem().ca is not None)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Return credentials of a channel to a peer: it shows the certificate, and trusts the same authority."""
    pem = files.pem()
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.chain)


class CurrentContext(ssl.SSLContext):
    """A server's context for asyncio that hands each new connection to the context of that moment."""

    files: TlsFiles

    @classmethod
    def of(cls, files: TlsFiles) -> "CurrentContext":
        """Return one for these files."""
        made = cls(ssl.PROTOCOL_TLS_SERVER)
        made.files = files
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection; see ssl.SSLContext."""
        return self.files.context().wrap_bio(*args, **kwargs)
