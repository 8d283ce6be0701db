"""The same timed request against any OpenAI-compatible server: server-sent events over HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from cluster.gateway.http.refusals import TYPES
from common.errors import BatonError, DeadlineError, NotFoundError, WorkerLostError
from common.status import CODES
from loadtest.client import ClientRequest, ServedModel, StreamLog
from loadtest.content import ChatPrompt, TextPrompt, TokenPrompt, as_text, token_ids

_EVENT_BYTES_MAX = 1 << 24
_BY_HTTP: dict[int, type[BatonError]] = {}
for _error, _codes in CODES.items():
    _BY_HTTP.setdefault(_codes.http, _error)
_BY_TYPE = {kind: status for status, kind in TYPES.items()}


class OpenAITarget:
    """`/v1/completions` for prompts by ids or text, `/v1/chat/completions` for chats.

    Args of the constructor:
        url: the server's root, with or without `/v1`.
        model: the name to ask for; None: the first that the server lists.
        context_tokens, vocab_tokens: the API does not tell them (some servers tell `max_model_len`).
        sends_words: send words instead of token ids, for servers that take no ids.
        api_key: sent as a bearer token.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        context_tokens: int,
        vocab_tokens: int,
        sends_words: bool = False,
        api_key: str | None = None,
    ) -> None:
        self._root = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = model
        self._context_tokens = context_tokens
        self._vocab_tokens = vocab_tokens
        self._sends_words = sends_words
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def model(self) -> ServedModel:
        """Ask what is served."""
        try:
            async with self._http().get(self._root + "/models") as response:
                await _raise_for_status(response)
                listed = (await response.json())["data"]
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
            raise WorkerLostError(f"{self._root}/models: {error!r}") from error
        entry = next((item for item in listed if self._model in (None, item["id"])), None)
        if entry is None:
            raise NotFoundError(f"{self._root} does not serve {self._model!r}")
        self._model = str(entry["id"])
        self._context_tokens = int(entry.get("max_model_len") or self._context_tokens)
        return ServedModel(self._model, self._context_tokens, self._vocab_tokens)

    async def generate(self, request: ClientRequest, log: StreamLog) -> None:
        """Send the request and write the stream into `log` until it ends."""
        path, body = self._encode(request)
        timeout = aiohttp.ClientTimeout(total=request.timeout_s)
        try:
            async with self._http().post(self._root + path, json=body, timeout=timeout) as response:
                await _raise_for_status(response)
                async for event in _events(response):
                    _note_event(event, log)
        except TimeoutError as error:
            raise DeadlineError(f"no end within {request.timeout_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise WorkerLostError(f"connection: {error!r}") from error
        if not log.finish_reason:
            raise WorkerLostError("the stream ended without a finish_reason")

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        # Made on first use: aiohttp wants the running loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 18
            )
        return self._session

    def _encode(self, request: ClientRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        match request.prompt:
            case ChatPrompt(messages):
                body["messages"] = [{"role": item.role, "content": item.content} for item in messages]
                return "/chat/completions", body
            case TextPrompt(text):
                body["prompt"] = text
            case TokenPrompt() if self._sends_words:
                body["prompt"] = as_text(request.prompt).text
            case TokenPrompt():
                body["prompt"] = token_ids(request.prompt, self._vocab_tokens)
        return "/completions", body


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = (await response.text())[:2000]
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text
    retry_after = response.headers.get("Retry-After", "")
    raise _error_of(response.status, message, float(retry_after) if retry_after.replace(".", "", 1).isdigit() else 0.0)


def _error_of(http: int, message: str, retry_after_s: float = 0.0) -> BatonError:
    return _BY_HTTP.get(http, BatonError)(message, retry_after_s)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield each event's JSON until `[DONE]`; an event may be cut anywhere by the network."""
    pending = b""
    async for data in response.content.iter_any():
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            try:
                event = json.loads(payload)
            except ValueError as error:
                raise BatonError(f"not JSON in the stream: {payload[:200]!r}") from error
            if not isinstance(event, dict):
                raise BatonError(f"not an object in the stream: {payload[:200]!r}")
            yield event
        if len(pending) > _EVENT_BYTES_MAX:
            raise BatonError(f"an event of more than {_EVENT_BYTES_MAX} bytes")


def _note_event(event: dict[str, Any], log: StreamLog) -> None:
    if error := event.get("error"):
        details = error if isinstance(error, dict) else {"message": str(error)}
        code = details.get("code")  # vLLM's is the HTTP code; OpenAI's says little
        status = code if isinstance(code, int) else _BY_TYPE.get(str(details.get("type")), 500)
        raise _error_of(status, str(details.get("message", "")))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        # Reasoning models stream their thoughts under another name; they are tokens like any other.
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        if text:
            log.add(1)
            log.text.append(text)
        log.finish_reason = choice.get("finish_reason") or log.finish_reason
    if usage := event.get("usage"):
        log.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        log.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        log.cached_tokens = int(details.get("cached_tokens") or 0)
