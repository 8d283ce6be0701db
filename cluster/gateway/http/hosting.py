"""The HTTP server: uvicorn's connections on the gateway's own loop, without uvicorn's signals, threads or polling."""

import asyncio
import contextlib
import itertools
import logging
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Self

import h11
import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from cluster.gateway.http.refusals import HttpError, head_too_large, refusal_of
from common.config_doors import HttpConfig
from common.errors import ConfigError
from common.logs import log
from common.tls import CurrentContext, TlsFiles

IS_ONE_TOO_MANY = "is_one_too_many"
"""In the state of a request's scope: there is no place for its connection, so that it is to be refused."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
"""An ASGI application."""

_LOG = logging.getLogger(__name__)
_BACKLOG = 2048
_SEND_BUFFER_BYTES = 256 * 1024
"""Of the kernel, for each connection: left alone it grows to megabytes for a client that does not read."""
_FLUSH_S = 1.0
"""How long the last bytes of answers may take at an orderly stop."""
_OTHER_FILES = 1024
"""Descriptors that the process needs besides: gRPC's connections, the workers', files."""


class HttpHost:
    """Listens, and runs the application for each request. Create it with `start`; owned by the gateway's loop."""

    def __init__(self, config: HttpConfig, app: App) -> None:
        self.address = ""
        """host:port"""
        self.is_stopping = False
        self._settings = config
        self._config = uvicorn.Config(
            app,
            loop="none",
            http=H11Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # what clients do wrong is told to them, not to the log
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=int(config.idle_s),
            h11_max_incomplete_event_size=config.head_bytes_max,
        )
        self._config.load()
        self._state = ServerState()
        self._places = _Places(connections_that_fit(config.connections_max))
        self._gone = asyncio.Event()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, config: HttpConfig, app: App, host: str, port: int, files: TlsFiles | None = None) -> Self:
        """Listen.

        Args:
            config: limits.
            app: the ASGI application.
            host: address to listen on.
            port: 0: any free one.
            files: the certificate to show; None: connections are not encrypted.

        Raises:
            ConfigError: the port cannot be had.
        """
        hosting = cls(config, app)
        listener = _listen(host, port)
        hosting.address = f"{host}:{listener.getsockname()[1]}"
        loop = asyncio.get_running_loop()
        hosting._server = await loop.create_server(
            hosting._connection,
            sock=listener,
            backlog=_BACKLOG,
            ssl=None if files is None else CurrentContext.of(files),
        )
        return hosting

    @property
    def num_connections(self) -> int:
        """Open now."""
        return len(self._state.connections)

    def abort(self, client: tuple[str, int] | None) -> None:
        """Cut the connection from this address at once; what it has not read is dropped."""
        for connection in self._state.connections:
            if isinstance(connection, _Connection) and connection.client == client:
                connection.reset()

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, let requests run for `grace_s`, cancel the rest, close everything. Idempotent."""
        self.is_stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks and grace_s > 0:
            await asyncio.wait(set(self._state.tasks), timeout=grace_s)
        tasks = set(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.close()
        with contextlib.suppress(TimeoutError):
            await self._all_gone(_FLUSH_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await self._all_gone(_FLUSH_S)

    async def _all_gone(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while self._state.connections:
                self._gone.clear()
                await self._gone.wait()

    def _connection(self) -> "_Connection":
        return _Connection(self._config, self._state, self._settings, self._places, self._gone)


class _Places:
    """Which connections may be given up for a new one: who opens many and asks nothing keeps nobody out."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.silent: dict[_Connection, None] = {}
        """Have not asked for anything yet, oldest first."""
        self.idle: dict[_Connection, None] = {}
        """Between two requests, oldest first."""

    def give_up_one(self, newcomer: "_Connection") -> bool:
        """Cut the oldest connection that has nothing under way, silent ones first; False: there is none."""
        for connection in itertools.chain(self.silent, self.idle):
            if connection is not newcomer:
                connection.give_up()
                return True
        return False

    def forget(self, connection: "_Connection") -> None:
        """It has something under way, or is gone."""
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)


class _Connection(H11Protocol):
    """A connection that gives a client only so long to send a request's head, or a body that nobody waits for."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, limits: HttpConfig, places: _Places, gone: asyncio.Event
    ) -> None:
        super().__init__(config, state, {IS_ONE_TOO_MANY: False})
        self._arrival_s = limits.arrival_s
        self._head_bytes_max = limits.head_bytes_max
        self._places = places
        self._gone = gone
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Begin; the clock for the first request runs."""
        super().connection_made(transport)
        self._late = self.loop.call_later(self._arrival_s, transport.abort)
        self._places.silent[self] = None
        if len(self.connections) > self._places.connections_max:
            self.app_state[IS_ONE_TOO_MANY] = not self._places.give_up_one(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._expect_nothing()
        self._places.forget(self)
        super().connection_lost(exc)
        self._gone.set()

    def data_received(self, data: bytes) -> None:
        """Read on. Part of a head starts the clock, a whole one stops it, unless it was answered without its body."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self.conn.trailing_data[0]:
                self._expect_more()
            return
        if not self._is_owed_a_body:
            self._places.forget(self)
            self._expect_nothing()

    def on_response_complete(self) -> None:
        """Go on. What is left of a body whose request was refused may come, but not for ever."""
        super().on_response_complete()
        if self.app_state[IS_ONE_TOO_MANY]:
            self.transport.close()
        if self.cycle.response_complete:  # no other request had come already
            self._places.idle[self] = None
        # uvicorn's own timer ends with the next byte.
        if self._is_owed_a_body:
            self._expect_more()

    def give_up(self) -> None:
        """Close it: nothing is under way, and a new client wants its place."""
        self._places.forget(self)
        self.connections.discard(self)  # it counts no longer, whenever it is gone
        if self.transport.get_write_buffer_size():
            self.reset()
        self.transport.close()

    @property
    def _is_owed_a_body(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def reset(self) -> None:
        """Drop the connection and all that its client has not read, in the kernel's buffers too."""
        if (sock := self.transport.get_extra_info("socket")) is not None:
            # Without this the kernel goes on offering what is in its buffer to a client that takes nothing.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's words say less
        """Answer what is no HTTP."""
        headers = [("content-type", "application/json"), ("connection", "close")]
        refusal = refusal_of(HttpError(400, "this is not HTTP/1.1"))
        if len(self.conn.trailing_data[0]) > self._head_bytes_max:  # h11 gave up on it
            refusal = refusal_of(head_too_large(self._head_bytes_max))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            data = h11.Data(to_json(refusal.body))
            events = (h11.Response(status_code=refusal.status, headers=headers), data, h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def _expect_more(self) -> None:
        if self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self._arrival_s, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def connections_that_fit(connections_max: int) -> int:
    """How many of them this process may open; its limit of open files is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + _OTHER_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    fitting = max(soft - _OTHER_FILES, soft // 2)
    log(_LOG, logging.WARNING, "open files limit connections", open_files=soft, connections_max=fitting)
    return fitting


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named: asyncio switches Nagle's algorithm off on TCP alone, and connections inherit the name.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # connections inherit it
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: is the port taken? ({error.strerror or error})") from error
    return listener
