"""Whatever a client sends ends in an error that names the field, with OpenAI's body; never in a 500."""

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import pydantic
import pytest

from cluster.fake_worker import FakeModel
from cluster.gateway.http import hosting
from cluster.gateway.http.chat import ChatRequest
from cluster.gateway.http.refusals import refusal_of
from common import errors
from common.status import CODES
from tests.cluster.fake_cluster import fake_cluster, run, until
from tests.cluster.gateway.http.wire import get, post, wire

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}

WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "tool_calls": [TOOL]}]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "prompt"),
    ({"messages": [{"role": "user", "content": "word " * 500}]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_tokens": 9_999}, "max_tokens"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 9999}}, "logit_bias.5"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{**TOOL, "type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "often"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls[0].function.arguments"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"reasoning_effort": "Very high"}, "reasoning_effort"),
    ({"priority": 0.5}, "priority"),
    ({"priority": "urgent"}, "priority"),
    ({"priority": False}, "priority"),
    ({"ttft_target_s": 0}, "ttft_target_s"),
    ({"tpot_target_s": 1e6}, "tpot_target_s"),
    ({"tempurature": 1}, "tempurature"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [320], "echo": True}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
]


def test_each_wrong_field_is_named(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            for path, good, cases in (
                ("/v1/chat/completions", CHAT, WRONG_CHATS),
                ("/v1/completions", COMPLETION, WRONG_COMPLETIONS),
            ):
                for wrong, param in cases:
                    answer = await post(cluster, path, {**good, **wrong})
                    seen = (answer.status, answer.error["type"], answer.error["param"])
                    assert seen == (400, "invalid_request_error", param), (str(wrong)[:200], answer.error)

    run(scenario())


def test_what_changes_nothing_is_accepted(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            harmless = {
                "user": "me",
                "store": True,
                "metadata": {"a": "b"},
                "service_tier": "flex",
                "prompt_cache_key": "k",
                "priority": 0,
                "response_format": {"type": "text"},
                "skip_special_tokens": True,
                "n": None,
                "stop": None,
                "logit_bias": None,
            }
            chat = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]}
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            messages = [{"role": "developer", "content": parts, "name": "x"}, {"role": "user", "content": None}]

            first = await post(cluster, "/v1/chat/completions", {**CHAT, **harmless, **chat, "messages": messages})
            second = await post(cluster, "/v1/completions", {**COMPLETION, **harmless, "best_of": 1, "suffix": None})

            assert (first.status, second.status) == (200, 200), (first.body, second.body)
            told = await post(cluster, "/tokenize", {"messages": messages, "return_token_strs": True})
            assert "".join(told.json["token_strs"]).startswith(
                "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\n<|"
            )

    run(scenario())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"\xff", b'{"prompt":"\\ud800"}', b'{"prompt":NaN}', b"[" * 100_000], ids=repr
)
def test_what_is_no_request_is_refused(model_dir: Path, body: bytes) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await post(cluster, "/v1/completions", body)

            assert (answer.status, answer.error["type"], answer.error["code"]) == (400, "invalid_request_error", None)

    run(scenario())


def test_paths_and_methods_that_do_not_exist(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            assert (await get(cluster, "/v1/embeddings")).error["type"] == "not_found_error"
            wrong = await get(cluster, "/v1/completions")
            assert (wrong.status, wrong.headers["allow"]) == (405, "post")
            assert (await get(cluster, "/v1/models", "DELETE")).status == 405
            assert (await get(cluster, "/v1/models/x/y")).error["param"] == "model"

    run(scenario())


def test_a_body_that_announces_that_it_is_too_large_is_refused_before_it_is_read(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"body_bytes_max": 1000}) as cluster, wire(cluster) as connection:
            connection.send("/tokenize", b"", content_length="3000000")

            answer = await connection.response()
            connection.writer.write(b"x" * 3_000_000)  # as clients do that read nothing until all is sent
            connection.send("/health", method="GET")

            assert (answer.status, answer.error["message"]) == (413, "the body has more than 1000 bytes")
            assert (await connection.response()).status == 200

    run(scenario())


def test_a_body_without_a_length_is_refused_when_it_has_become_too_large(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"body_bytes_max": 1000}) as cluster, wire(cluster) as connection:
            head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            connection.writer.write(head + b"3e9\r\n" + b"x" * 1001 + b"\r\n")

            answer = await connection.response()

            assert (answer.status, answer.error["message"]) == (413, "the body has more than 1000 bytes")
            assert await connection.is_closed()

    run(scenario())


def test_a_request_with_two_lengths_ends_its_connection(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            hidden = b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            connection.send("/tokenize", hidden, transfer_encoding="chunked")

            answer = await connection.response()

            assert (answer.status, "exclude each other" in answer.error["message"]) == (400, True)
            assert await connection.is_closed()

    run(scenario())


def test_a_request_that_comes_too_slowly_is_ended(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"arrival_s": 0.1}) as cluster:
            async with wire(cluster) as connection:
                connection.send("/tokenize", b"{", content_length="100")
                assert (await connection.response()).status == 408
            async with wire(cluster) as silent:
                assert await silent.is_closed()
            async with wire(cluster) as connection:
                connection.send("/health", method="GET")
                await connection.response()
                connection.writer.write(b"GET /health HT")
                assert await connection.is_closed()

    run(scenario())


@pytest.mark.parametrize("framing", ["content-length: 999999", "transfer-encoding: chunked"])
def test_who_was_refused_cannot_hold_a_connection_by_sending_on(model_dir: Path, framing: str) -> None:
    async def scenario() -> None:
        limits = {"arrival_s": 0.2, "idle_s": 1}
        async with fake_cluster(model_dir, http=limits) as cluster, wire(cluster) as connection:
            connection.writer.write(f"POST /nowhere HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
            assert (await connection.response()).status == 404
            connection.writer.write(b"5\r\nab")

            assert await connection.is_closed()

    run(scenario())


def test_a_refused_body_that_comes_late_leaves_its_connection_usable(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            connection.send("/nowhere", b"", content_length="4")
            assert (await connection.response()).status == 404
            connection.writer.write(b"late")
            connection.send("/health", method="GET")

            assert (await connection.response()).status == 200

    run(scenario())


def test_arguments_that_no_template_can_write_are_refused_by_their_path(model_dir: Path) -> None:
    # Python's parser takes half a character, and nesting up to a depth that depends on who calls it.
    deep = ('{"a":' * depth + "1" + "}" * depth for depth in range(900, 960))
    path = "messages[1].tool_calls[0].function.arguments"

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            for arguments in ('{"a": "\\ud800"}', '{"\\udfff": 1}', *deep):
                call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
                messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]

                answer = await post(cluster, "/v1/chat/completions", {**CHAT, "messages": messages})

                assert (answer.status, answer.error["message"].startswith(f"{path} is not JSON")) == (400, True)

    run(scenario())


def test_a_variable_of_the_template_may_have_any_name(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            more = {"chat_template_kwargs": {"self": 1, "source": 2, "text": 3, "": 4}}

            assert (await post(cluster, "/v1/chat/completions", {**CHAT, **more})).status == 200

    run(scenario())


def test_what_is_no_http_and_a_head_that_is_too_long_are_told_so(model_dir: Path) -> None:
    long = b"GET /health HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 5000
    cases = [
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "this is not HTTP/1.1"),
        (long, 431, "more than 2000 bytes"),  # it has not ended
        (long + b"\r\n\r\n", 431, "more than 2000 bytes"),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431, "more than 2000 bytes"),
    ]

    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"head_bytes_max": 2000}) as cluster:
            for data, status, words in cases:
                async with wire(cluster) as connection:
                    connection.writer.write(data)
                    assert (await connection.head())[0] == status
                    error = json.loads(await connection.reader.read())["error"]
                    assert (error["type"], words in error["message"]) == ("invalid_request_error", True)

    run(scenario())


def test_when_all_connections_are_busy_a_new_one_is_told_to_come_back(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"connections_max": 1}) as cluster, wire(cluster) as first:
            cluster.worker("d0").may_step.clear()
            first.send("/v1/completions", COMPLETION)
            await asyncio.wait_for(cluster.worker("d0").sequence_started.wait(), 10)

            async with wire(cluster) as second:
                second.send("/health", method="GET")
                answer = await second.response()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert await second.is_closed()

            cluster.worker("d0").may_step.set()
            assert (await first.response()).status == 200

    run(scenario())


def test_connections_that_ask_for_nothing_keep_nobody_out(model_dir: Path) -> None:
    """A stranger's many open sockets: the oldest makes room, and who has asked before keeps its own."""

    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"connections_max": 3}) as cluster, wire(cluster) as known:
            known.send("/health", method="GET")
            assert (await known.response()).status == 200
            async with wire(cluster) as oldest, wire(cluster) as second, wire(cluster) as third:
                assert await oldest.is_closed()
                known.send("/health", method="GET")
                assert (await known.response()).status == 200

                assert (await get(cluster, "/health")).status == 200
                assert await second.is_closed()
                assert not third.reader.at_eof()

    run(scenario())


def test_a_connection_between_requests_makes_room_for_a_new_one(model_dir: Path) -> None:
    async def scenario() -> None:
        limits = {"connections_max": 2}
        async with fake_cluster(model_dir, http=limits) as cluster, wire(cluster) as older, wire(cluster) as newer:
            for connection in (older, newer, older):  # `newer` has been idle for longer then
                connection.send("/health", method="GET")
                assert (await connection.response()).status == 200

            assert (await get(cluster, "/health")).status == 200

            assert await newer.is_closed()
            older.send("/health", method="GET")
            assert (await older.response()).status == 200

    run(scenario())


def test_the_limit_of_open_files_is_raised_and_bounds_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))

    assert hosting.connections_that_fit(1000) == 1000
    assert limits["now"] == (2024, 4096)
    assert hosting.connections_that_fit(16_384) == 3072
    assert limits["now"] == (4096, 4096)


def test_more_requests_than_may_run_are_told_to_come_back(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, running_max=1) as cluster, wire(cluster) as first:
            cluster.worker("d0").may_step.clear()
            first.send("/v1/completions", COMPLETION)
            await asyncio.wait_for(cluster.worker("d0").sequence_started.wait(), 10)

            answer = await post(cluster, "/v1/completions", COMPLETION)

            assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
            assert answer.headers["retry-after"] == "1"
            cluster.worker("d0").may_step.set()
            assert (await first.response()).status == 200

    run(scenario())


def test_overload_is_refused_with_a_time_to_come_back_and_the_lowest_class_first(model_dir: Path) -> None:
    low, high = {**COMPLETION, "priority": "low"}, {**COMPLETION, "priority": "high"}

    async def scenario() -> None:
        async with fake_cluster(model_dir, model=FakeModel(running_max=1), queue_max=1) as cluster:
            cluster.worker("d0").may_step.clear()
            running = [asyncio.create_task(post(cluster, "/v1/completions", COMPLETION)) for _ in range(2)]
            await until(lambda: cluster.router.status().reservations == 2, "not placed")
            waiting = asyncio.create_task(post(cluster, "/v1/completions", low))
            await until(lambda: cluster.router.status().queued == 1, "does not wait")

            refused = await post(cluster, "/v1/completions", low)
            urgent = asyncio.create_task(post(cluster, "/v1/completions", high))
            shed = await waiting

            for answer in (refused, shed):
                assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
                assert answer.error["code"] == "rate_limit_exceeded"
                assert int(answer.headers["retry-after"]) >= 1
            cluster.worker("d0").may_step.set()
            assert [(await task).status for task in (*running, urgent)] == [200] * 3

    run(scenario())


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_every_error_has_its_code_and_words(kind: type[errors.BatonError]) -> None:
    refusal = refusal_of(kind("the words", 1.5))

    assert refusal.status == CODES[kind].http
    assert refusal.body["error"]["message"] == "the words"
    assert refusal.headers.get("retry-after") == ("2" if refusal.status in (429, 503) else None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages must have at least 1 item, got 0"),
        ({"messages": [{}]}, "messages[0].role is missing"),
        ({**CHAT, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({**CHAT, "temperature": "hot"}, "temperature must be a number"),
        ({**CHAT, "stop": 5}, "stop must be text or a list"),
        ({**CHAT, "stop": ["a"] * 17}, "stop must have at most 16 items, got 17"),
        ({**CHAT, "tool_choice": "x"}, "tool_choice must be 'none', 'auto' or 'required' or an object"),
        (
            {**CHAT, "response_format": {"type": "x"}},
            "response_format.type must be 'text', 'json_object' or 'json_schema'",
        ),
        ({**CHAT, "colour": "red"}, "colour is an unknown field"),
        ([], "the body must be an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_is_wrong_is_named_in_plain_words(body: object, words: str) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        ChatRequest.model_validate_json(json.dumps(body))

    assert refusal_of(raised.value).body["error"]["message"] == words


def test_an_unforeseen_error_says_its_class_and_nothing_else() -> None:
    assert refusal_of(KeyError("secret")).body["error"]["message"] == "internal error: KeyError"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(b'{"prompt": "x", "user": [%s1]}' % (b"[]," * 200_000), "1800017 values", id="many lists"),
        pytest.param(b'{"prompt": "x", "user": [%s1]}' % (b"{}," * 200_000), "1800017 values", id="many objects"),
        pytest.param(b'{"prompt": [%s1]}' % (b"1," * 300_000), "300016 values", id="many ids"),
        pytest.param(
            b'{"prompt": "x", %s}' % b", ".join(b'"x%d": 1' % i for i in range(3000)),
            "3000 faults",
            id="unknown fields",
        ),
        pytest.param(b'{"prompt": "x", "user": "%s"}' % (b"x" * (4 << 20)), f"more than {4 << 20} bytes", id="bytes"),
    ],
)
def test_a_body_that_would_take_long_to_read_is_refused(model_dir: Path, body: bytes, words: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await post(cluster, "/v1/completions", body)

            assert answer.status in (400, 413)
            assert words in answer.error["message"]

    run(scenario())


def test_ids_beyond_the_window_are_not_turned_into_text(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            window = (await get(cluster, "/v1/models")).json["data"][0]["max_model_len"]
            whole = await post(cluster, "/detokenize", {"tokens": [65] * window})
            longer = await post(cluster, "/detokenize", {"tokens": [65] * (window + 1)})
            shown = await post(cluster, "/tokenize", {"prompt": "x" * (window + 1), "return_token_strs": True})
            counted = await post(cluster, "/tokenize", {"prompt": "x" * (window + 1)})

            assert whole.status == 200
            assert (longer.status, longer.error["param"]) == (400, "tokens")
            assert (shown.status, shown.error["param"]) == (400, "tokens")
            assert counted.json["count"] > window

    run(scenario())
