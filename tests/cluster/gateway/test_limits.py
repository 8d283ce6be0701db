"""Every limit of the gateway is said in words when it is met, on both faces, and nothing is left of what met it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton_pb.v1 import common_pb2, inference_pb2
from common.config_doors import RequestLimitsConfig
from common.errors import DeadlineError, InvalidRequestError, OverloadedError
from common.status import typed_rpc_errors
from tests.cluster.fake_cluster import LIMIT_S, fake_cluster, request, run, until
from tests.cluster.gateway.http.wire import post, wire

STREAM = {"prompt": "hello", "stream": True, "max_tokens": 64}
HELLO = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hello")])
LONG = json.dumps({"type": "object", "description": "x" * 200})
DEEP = json.dumps({"type": "array", "items": {"type": "array", "items": {"type": "object", "properties": {"a": {}}}}})


def test_a_request_without_a_token_for_too_long_ends_and_is_cancelled_at_its_worker(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, token_wait_s=0.1) as cluster:
            worker = cluster.worker("d0")
            worker.may_step.clear()

            with pytest.raises(DeadlineError, match=r"no token came for 0\.1 s"):
                await cluster.ask(request("hello"))

            await until(lambda: worker.num_running == 0, "not cancelled")
            worker.may_step.set()

    run(scenario())


def test_no_request_lives_longer_than_the_gateway_allows(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, request_s=0.2) as cluster:
            worker = cluster.worker("d0")
            worker.may_step.clear()

            with pytest.raises(DeadlineError, match=r"0\.200 s after it arrived"):
                await cluster.ask(request("hello"), timeout_s=None)
            whole = await post(cluster, "/v1/completions", {"prompt": "hello"})
            assert (whole.status, whole.error["type"]) == (504, "timeout_error")

            await until(lambda: worker.num_running == 0, "not cancelled")
            worker.may_step.set()

    run(scenario())


def test_a_stream_that_lives_too_long_ends_with_an_event_that_says_so(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, request_s=0.5) as cluster:
            cluster.worker("d0").step_s = 0.05
            async with wire(cluster) as connection:
                connection.send("/v1/completions", {**STREAM, "ignore_eos": True, "max_tokens": 200})
                assert (await connection.head())[0] == 200
                *_, last, done = await connection.rest()

            assert "deadline passed" in last
            assert done == "data: [DONE]"

    run(scenario())


@pytest.mark.parametrize(
    ("limits", "asked", "body"),
    [
        pytest.param(
            {"stop_strings_max": 2},
            request("hello", stop=["a", "b", "c"]),
            {"prompt": "hello", "stop": ["a", "b", "c"]},
            id="stop",
        ),
        pytest.param(
            {"logit_bias_max": 1},
            request("hello", logit_bias={4: 1.0, 5: 1.0}),
            {"prompt": "hello", "logit_bias": {"4": 1, "5": 1}},
            id="logit_bias",
        ),
        pytest.param(
            {"messages_max": 1},
            inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="a")] * 2)
            ),
            {"messages": [{"role": "user", "content": "a"}] * 2},
            id="messages",
        ),
    ],
)
def test_a_request_that_holds_too_much_is_refused_with_field_limit_and_number(
    model_dir: Path, limits: dict[str, int], asked: inference_pb2.GenerateRequest, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        (most,) = limits.values()
        field = next(iter(limits)).removesuffix("_max").removesuffix("_strings")
        async with fake_cluster(model_dir, request=RequestLimitsConfig.model_validate(limits)) as cluster:
            with pytest.raises(InvalidRequestError, match=rf"{field} must have at most {most} \w+, got {most + 1}"):
                await cluster.ask(asked)
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = await post(cluster, path, body)
            assert (answer.status, answer.error["param"]) == (400, field)

    run(scenario())


@pytest.mark.parametrize(
    ("limits", "asked", "body", "words"),
    [
        pytest.param(
            {"request": {"schema_bytes_max": 100}},
            request("hello", grammar=common_pb2.Grammar(json_schema=LONG)),
            {"guided_json": json.loads(LONG)},
            "at most 100 bytes",
            id="size",
        ),
        pytest.param(
            {"request": {"schema_depth_max": 3}},
            request("hello", grammar=common_pb2.Grammar(json_schema=DEEP)),
            {"guided_json": json.loads(DEEP)},
            "at most 3 levels, got 5",
            id="depth",
        ),
        pytest.param(
            {"request": {"tools_max": 1}},
            inference_pb2.GenerateRequest(chat=HELLO, tools=[inference_pb2.Tool(name=name) for name in "ab"]),
            {"tools": [{"type": "function", "function": {"name": name}} for name in "ab"]},
            "at most 1 entries, got 2",
            id="tools",
        ),
        pytest.param(
            {"prompt_tokens_max": 6},
            inference_pb2.GenerateRequest(chat=HELLO),
            {},
            "at most 6 are possible",
            id="prompt",
        ),
    ],
)
def test_schemas_tools_and_prompts_have_limits_that_no_worker_hears_of(
    model_dir: Path, limits: dict[str, Any], asked: inference_pb2.GenerateRequest, body: dict[str, Any], words: str
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, **limits) as cluster:
            with pytest.raises(InvalidRequestError, match=words):
                await cluster.ask(asked)
            chat = {"messages": [{"role": "user", "content": "hello"}]}
            answer = await post(cluster, "/v1/chat/completions", {**chat, **body})
            assert (answer.status, answer.error["param"]) == (400, next(iter(body), "prompt"))
            assert words in answer.error["message"]
            assert cluster.worker("d0").started == []

    run(scenario())


def test_headers_and_calls_have_limits_on_grpc_too(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, metadata_bytes_max=2048, calls_max=1) as cluster:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await cluster.admin.GetStatus(
                    inference_pb2.ListModelsRequest(), metadata=(("long", "x" * 4096),), timeout=LIMIT_S
                )
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

            worker = cluster.worker("d0")
            worker.may_step.clear()
            first = cluster.call(request("hello"))
            await until(lambda: worker.num_running == 1, "not started")
            with pytest.raises(OverloadedError), typed_rpc_errors():
                await cluster.status()
            first.cancel()
            await until(lambda: worker.num_running == 0, "not cancelled")
            worker.may_step.set()

    run(scenario())


def test_a_connection_without_calls_is_closed_and_the_next_call_opens_another(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, idle_s=0.2) as cluster:
            await cluster.status()
            async with asyncio.timeout(LIMIT_S):
                while (state := cluster.channel.get_state()) is grpc.ChannelConnectivity.READY:
                    await cluster.channel.wait_for_state_change(state)

            worker = cluster.worker("d0")
            worker.step_s = 0.05  # a call that is slower than that is no idle connection
            assert len((await cluster.ask(request("hello", ignore_eos=True, max_tokens=10))).token_ids) == 10

    run(scenario())
