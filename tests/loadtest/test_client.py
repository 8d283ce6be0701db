"""A stream is timed token by token, over real gRPC and real HTTP; every failure is a typed error."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from aiohttp import web

from common.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    WorkerLostError,
)
from loadtest.client import BatonTarget, ClientRequest, StreamLog
from loadtest.content import ChatPrompt, Message, Prompt, Segment, TextPrompt, TokenPrompt, token_ids
from loadtest.echo import VOCAB_TOKENS, EchoServer, EchoTimes
from loadtest.openai import OpenAITarget

T = TypeVar("T")
PROMPT = TokenPrompt((Segment(1, 20),))


def request(prompt: Prompt = PROMPT, output_tokens: int = 5, timeout_s: float = 20.0) -> ClientRequest:
    return ClientRequest("r1", prompt, output_tokens, True, timeout_s, 0)


def with_echo(use: Callable[[BatonTarget], Awaitable[T]], times: EchoTimes = EchoTimes()) -> T:  # noqa: B008 - frozen
    async def main() -> T:
        server = await EchoServer.start(times)
        target = BatonTarget(server.address)
        try:
            await target.model()
            return await use(target)
        finally:
            await target.close()
            await server.stop()

    return asyncio.run(main())


def with_http(handlers: dict[str, web.RequestHandler | object], use: Callable[[str], Awaitable[T]]) -> T:
    async def main() -> T:
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_route("*", path, handler)  # type: ignore[arg-type]  # any coroutine function will do
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            return await use(f"http://127.0.0.1:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


async def generated(target: BatonTarget | OpenAITarget, what: ClientRequest) -> StreamLog:
    log = StreamLog()
    await target.generate(what, log)
    return log


def test_grpc_tokens_are_timed_one_by_one() -> None:
    log = with_echo(lambda target: generated(target, request()))
    record = log.record(request(), 3, 1, intended=1.0, sent=2.0, error=None, start=1.0)

    assert log.token_ids == token_ids(PROMPT, VOCAB_TOKENS)[:5]
    assert log.token_times == sorted(log.token_times)
    assert (record.prompt_tokens, record.output_tokens, len(record.gaps_s)) == (20, 5, 4)
    assert (record.intended_s, record.sent_s, record.decode_worker) == (0.0, 1.0, "echo")
    assert (record.finish_reason, record.prefill_worker) == ("length", "echo")


def test_grpc_errors_keep_their_class_and_words() -> None:
    with pytest.raises(InvalidRequestError, match="9000 tokens"):
        with_echo(lambda target: generated(target, request(TokenPrompt((Segment(1, 9000),)))))


def test_a_grpc_deadline_is_a_deadline_error() -> None:
    with pytest.raises(DeadlineError):
        with_echo(lambda target: generated(target, request(timeout_s=0.2)), EchoTimes(ttft_s=30.0))


def test_an_unreachable_server_is_a_lost_worker() -> None:
    async def ask() -> None:
        target = BatonTarget("127.0.0.1:1")
        try:
            await target.model()
        finally:
            await target.close()

    with pytest.raises(WorkerLostError):
        asyncio.run(ask())


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m", "max_model_len": 2048}, {"id": "n"}]})


def event(tree: dict[str, object]) -> bytes:
    return f"data: {json.dumps(tree)}\n\n".encode()


def streaming(pieces: list[bytes], seen: list[dict[str, object]] | None = None) -> Callable[..., Awaitable[object]]:
    async def handler(http: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(await http.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for piece in pieces:
            await response.write(piece)
        return response

    return handler


def completions(pieces: list[bytes], what: ClientRequest, seen: list[dict[str, object]] | None = None) -> StreamLog:
    handler = streaming(pieces, seen)

    async def use(url: str) -> StreamLog:
        target = OpenAITarget(url + "/v1", None, 1024, 4096)
        try:
            await target.model()
            return await generated(target, what)
        finally:
            await target.close()

    return with_http({"/v1/models": models, "/v1/completions": handler, "/v1/chat/completions": handler}, use)


ANSWER = [
    event({"choices": [{"text": "Hel"}]}),
    event({"choices": [{"text": "lo"}]}),
    event({"choices": [{"text": "", "finish_reason": "length"}]}),
    event(
        {
            "choices": [],
            "usage": {"prompt_tokens": 20, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}},
        }
    ),
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_read_however_the_network_cuts_them(size: int) -> None:
    whole = b"".join(ANSWER)

    log = completions([whole[at : at + size] for at in range(0, len(whole), size)], request())

    assert "".join(log.text) == "Hello"
    assert (len(log.token_times), log.finish_reason) == (2, "length")
    assert (log.prompt_tokens, log.output_tokens, log.cached_tokens) == (20, 2, 16)


def test_token_prompts_travel_as_ids_and_texts_as_text() -> None:
    seen: list[dict[str, object]] = []

    completions(ANSWER, request(), seen)
    completions(ANSWER, request(TextPrompt("Once")), seen)

    assert seen[0]["prompt"] == token_ids(PROMPT, 4096)
    assert seen[1]["prompt"] == "Once"
    assert (seen[0]["model"], seen[0]["max_tokens"], seen[0]["ignore_eos"]) == ("m", 5, True)


def test_chats_travel_as_messages_and_their_deltas_count() -> None:
    seen: list[dict[str, object]] = []
    pieces = [event({"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}), b"data: [DONE]\n\n"]

    log = completions(pieces, request(ChatPrompt((Message("user", "Hello"),))), seen)

    assert seen[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert (log.text, log.finish_reason, len(log.token_times)) == (["Hi"], "stop", 1)


@pytest.mark.parametrize(
    ("pieces", "error", "words"),
    [
        ([event({"error": {"message": "gone", "code": 503}})], WorkerLostError, "gone"),
        (
            [event({"error": {"message": "gone", "type": "service_unavailable_error", "code": None}})],
            WorkerLostError,
            "gone",
        ),
        ([event({"error": "boom"})], BatonError, "boom"),
        ([ANSWER[0]], WorkerLostError, "without a finish_reason"),
        ([b"data: {nonsense\n\n"], BatonError, "not JSON"),
    ],
    ids=["by code", "by type", "untyped", "cut off", "garbage"],
)
def test_a_stream_that_breaks_is_an_error(pieces: list[bytes], error: type[BatonError], words: str) -> None:
    with pytest.raises(error, match=words):
        completions(pieces, request())


def test_an_http_status_is_the_error_it_stands_for() -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "3"})

    async def use(url: str) -> StreamLog:
        target = OpenAITarget(url, "m", 1024, 4096)
        try:
            return await generated(target, request())
        finally:
            await target.close()

    with pytest.raises(OverloadedError, match="full") as caught:
        with_http({"/v1/completions": busy}, use)

    assert caught.value.retry_after_s == 3


def test_a_model_that_is_not_served_is_not_found() -> None:
    async def use(url: str) -> object:
        target = OpenAITarget(url, "other", 1024, 4096)
        try:
            return await target.model()
        finally:
            await target.close()

    with pytest.raises(NotFoundError, match="other"):
        with_http({"/v1/models": models}, use)


def test_the_window_is_taken_from_servers_that_tell_it() -> None:
    async def use(url: str) -> tuple[str, int]:
        target = OpenAITarget(url, None, 1024, 4096)
        try:
            served = await target.model()
        finally:
            await target.close()
        return served.id, served.context_tokens

    assert with_http({"/v1/models": models}, use) == ("m", 2048)
