"""The ASGI application: paths, their endpoints, and the frame in which every request ends with an answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

import pydantic

from baton_pb.v1 import inference_pb2
from cluster.gateway.choices import Streams, check_count, choices_of
from cluster.gateway.generate import Generator
from cluster.gateway.http.answer import Answer
from cluster.gateway.http.body_values import LIST_WEIGHT, num_values
from cluster.gateway.http.chat import ChatForm, ChatRequest
from cluster.gateway.http.completions import CompletionForm, CompletionRequest
from cluster.gateway.http.cors import preflight_headers
from cluster.gateway.http.exchange import Exchange, wanted_timeout_s
from cluster.gateway.http.fields import SamplingFields
from cluster.gateway.http.hosting import IS_ONE_TOO_MANY, HttpHost, Message, Receive, Send
from cluster.gateway.http.openapi import DOCS_PAGE, document
from cluster.gateway.http.refusals import HttpError, head_too_large, refusal_of
from cluster.gateway.http.services import DetokenizeRequest, TextService, TokenizeRequest
from cluster.gateway.metrics import Metrics
from cluster.gateway.ready import readiness
from cluster.gateway.router_client import RouterClient, away
from cluster.gateway.tokenizing import Tokenizing
from cluster.tenants.callers import holder_at
from cluster.tenants.door import Door, stopping
from cluster.tenants.shares import Shares
from common.config_doors import HttpConfig
from common.errors import BatonError, CancelledRequestError, InvalidRequestError, WorkerLostError
from common.fair_thread import FairThread
from common.logs import log
from common.rpc_guard import INLINE_BYTES_MAX
from common.text import Text
from common.tls import TlsFiles
from common.turnstile import Turnstile
from common.waits import Waits

_LOG = logging.getLogger(__name__)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MODELS = "/v1/models/"

Body = TypeVar("Body", bound=pydantic.BaseModel)
Endpoint = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Parts:
    """The gateway's parts that the application uses."""

    generator: Generator
    tokenizing: Tokenizing
    thread: FairThread
    """Where large bodies are read."""
    arrivals: Turnstile
    """For those that arrive and are read."""
    text: Text
    router: RouterClient
    metrics: Metrics
    door: Door


class HttpFace:
    """Serves OpenAI's API. Owned by the gateway's loop; `open` makes it listen."""

    def __init__(self, config: HttpConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._services = TextService(parts.generator, parts.tokenizing, parts.text)
        self._hosting: HttpHost | None = None
        self._unread = Waits(config.unread_s)
        self._requests = Shares("HTTP requests", config.connections_max)
        self._endpoints: dict[str, tuple[str, Endpoint]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/is_sleeping": ("GET", self._is_sleeping),
            "/load": ("GET", self._load),
            "/version": ("GET", self._version),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
            "/docs": ("GET", self._docs),
        }

    @property
    def address(self) -> str:
        """host:port; empty before `open`."""
        return "" if self._hosting is None else self._hosting.address

    async def open(self, host: str, port: int, files: TlsFiles | None) -> None:
        """Listen; encrypted, if there is a certificate.

        Raises:
            ConfigError: the port cannot be had.
        """
        self._hosting = await HttpHost.start(self._config, self, host, port, files)

    async def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s`, then end them and close everything. Idempotent."""
        if self._hosting is not None:
            await self._hosting.stop(grace_s)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request. Whatever happens, the client gets an answer, unless it has left."""
        assert self._hosting is not None, "requests come from it"
        hosting = self._hosting
        limit_s = self._parts.generator.request_s
        is_one_too_many: bool = scope["state"][IS_ONE_TOO_MANY]
        exchange = Exchange(
            scope,
            receive,
            send,
            self._config,
            self._unread,
            limit_s,
            lambda: hosting.abort(scope["client"]),
            lambda: is_one_too_many or self._parts.door.is_shut,
        )
        try:
            await self._answer(exchange, hosting, is_one_too_many=is_one_too_many)
        except CancelledRequestError:
            pass  # nobody is there to be told; it is logged nowhere: it is normal
        finally:
            exchange.close()
            path = exchange.path if exchange.path in self._endpoints else "other"
            self._parts.metrics.http_responses[path, exchange.status or 499] += 1

    async def _answer(self, exchange: Exchange, hosting: HttpHost, *, is_one_too_many: bool) -> None:
        try:
            if is_one_too_many:
                raise WorkerLostError("all connections that may be open are busy")
            if exchange.head_bytes > self._config.head_bytes_max:
                raise head_too_large(self._config.head_bytes_max)
            if "transfer-encoding" in exchange.headers and "content-length" in exchange.headers:
                # RFC 9112, 6.3: a proxy may have seen another end of it, and what follows as somebody else's request.
                raise HttpError(400, "content-length and transfer-encoding exclude each other", {"connection": "close"})
            async with exchange.deadline:
                exchange.deadline.shorten(wanted_timeout_s(exchange.headers))
                endpoint = self._endpoint(exchange)
                if endpoint != self._preflight:  # browsers show no key when they ask
                    await self._parts.door.admit_http(exchange.path.rstrip("/") or "/", exchange.headers)
                with self._requests.place(holder_at(exchange.address)):
                    await endpoint(exchange)
        except CancelledRequestError:
            raise
        except asyncio.CancelledError:
            if not hosting.is_stopping:
                raise
            # This is the outermost frame: the cancellation ends here, with an answer.
            await exchange.fail(refusal_of(stopping()))
        except (BatonError, HttpError, pydantic.ValidationError) as error:
            await exchange.fail(refusal_of(error))
        except Exception as error:
            _LOG.exception("a request met a bug")
            name = type(error).__name__
            log(_LOG, logging.ERROR, f"internal error: {name}", request_id=exchange.request_id)
            await exchange.fail(refusal_of(error))

    def _endpoint(self, exchange: Exchange) -> Endpoint:
        path = exchange.path.rstrip("/") or "/"
        endpoint: Endpoint
        if exchange.method == "OPTIONS" and exchange.cors_headers:
            return self._preflight
        if path.startswith(_MODELS):
            method, endpoint = "GET", self._model
        elif path in self._endpoints:
            method, endpoint = self._endpoints[path]
        elif path == "/":
            method, endpoint = "GET", self._docs
        else:
            raise HttpError(404, f"no such path: {exchange.path[:200]}; see /docs")
        if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
            raise HttpError(405, f"{path} takes {method}, not {exchange.method[:20]}", {"allow": method})
        return endpoint

    async def _read(self, exchange: Exchange, body: type[Body]) -> Body:
        """Read and check a request's body; large ones one at a time, so that streams go on between them.

        Raises:
            InvalidRequestError: it has too many parts.
            pydantic.ValidationError: it is not what it should be.
        """
        if exchange.announced_bytes <= INLINE_BYTES_MAX:
            return body.model_validate_json(await exchange.body())
        async with self._parts.arrivals.turn(holder_at(exchange.address)):
            return await self._read_large(await exchange.body(), body)

    async def _read_large(self, data: bytes, body: type[Body]) -> Body:
        if (num := num_values(data)) > (most := self._config.body_values_max):
            raise InvalidRequestError(
                f"the body has {num} values, a list or an object counted as {LIST_WEIGHT}, more than {most}"
            )
        return await self._parts.thread.run(lambda: body.model_validate_json(data), holds_loop_up=True)

    async def _chat(self, exchange: Exchange) -> None:
        asked = await self._read(exchange, ChatRequest)
        exchange.name(asked.request_id)
        check_count(asked.num_choices, self._config.choices_max)
        streams, model_id = self._streams(exchange, asked, asked.to_pb()), self._parts.generator.limits().model_id
        form = ChatForm(exchange.request_id, asked, self._parts.text)
        with asked.named_as_asked():
            await Answer(exchange, asked, form, model_id).serve(streams)

    async def _completions(self, exchange: Exchange) -> None:
        asked = await self._read(exchange, CompletionRequest)
        exchange.name(asked.request_id)
        check_count(len(asked.prompts) * asked.num_choices, self._config.choices_max)
        if asked.echo:
            self._check_ids(asked)
        streams = self._streams(exchange, asked, *map(asked.to_pb, asked.prompts))
        model_id = self._parts.generator.limits().model_id
        form = CompletionForm(exchange.request_id, asked, self._parts.text)
        with asked.named_as_asked():
            await Answer(exchange, asked, form, model_id).serve(streams)

    def _streams(self, exchange: Exchange, asked: SamplingFields, *messages: inference_pb2.GenerateRequest) -> Streams:
        if asked.timeout_s is not None:
            exchange.deadline.shorten(asked.timeout_s)
        return choices_of(self._parts.generator.generate, messages, exchange.request_id, exchange.deadline.left_s)

    def _check_ids(self, asked: CompletionRequest) -> None:
        """Refuse ids that cannot be turned into text before that is tried."""
        vocab_tokens = self._parts.generator.limits().vocab_tokens
        for prompt in asked.prompts:
            if not isinstance(prompt, str) and max(prompt) >= vocab_tokens:
                raise InvalidRequestError(f"prompt must have ids below {vocab_tokens}, got {max(prompt)}")

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, self._services.models())

    async def _model(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, self._services.model(exchange.path.removeprefix(_MODELS)))

    async def _tokenize(self, exchange: Exchange) -> None:
        asked = await self._read(exchange, TokenizeRequest)
        await exchange.reply_json(200, await self._services.tokenize(asked))

    async def _detokenize(self, exchange: Exchange) -> None:
        asked = await self._read(exchange, DetokenizeRequest)
        await exchange.reply_json(200, await self._services.detokenize(asked))

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, {"status": "ok"})

    async def _preflight(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, {}, preflight_headers(exchange.headers))

    async def _version(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, {"version": metadata.version("baton-serve")})

    async def _is_sleeping(self, exchange: Exchange) -> None:
        """Answer those who ask vLLM's server, which can put its weights aside."""
        await exchange.reply_json(200, {"is_sleeping": False})

    async def _load(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, {"server_load": self._parts.metrics.running})

    async def _ready(self, exchange: Exchange) -> None:
        """Say whether a request could be placed now."""
        self._parts.door.check_open()
        workers, is_degraded = await readiness(self._parts.router)
        await exchange.reply_json(200, {"status": "ready", "workers": workers, "is_degraded": is_degraded})

    async def _metrics(self, exchange: Exchange) -> None:
        assert self._hosting is not None
        self._parts.metrics.http_connections = self._hosting.num_connections
        try:
            router = await self._parts.router.status()
        except WorkerLostError as error:
            router = away(error)
        await exchange.reply(200, self._parts.metrics.page(router).encode(), _METRICS_TYPE)

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, document())

    async def _docs(self, exchange: Exchange) -> None:
        await exchange.reply(200, DOCS_PAGE, "text/html; charset=utf-8")
