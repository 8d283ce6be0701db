"""What clients of vLLM send besides OpenAI's fields does here what it does there, or is refused by its name."""

from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from baton_pb.v1 import inference_pb2
from cluster.gateway.http.chat import ChatRequest
from common.text import Text
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, request, run
from tests.cluster.gateway.http.wire import event, get, post, wire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASSISTANT = {"role": "assistant", "content": "Sure, "}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
END = 3  # <|im_end|>, the model's stop token


def says(cluster: FakeCluster, ids: list[int]) -> None:
    """Let the decode worker answer with these tokens, then with its stop token."""
    cluster.worker("d0").script = lambda prompt: iter([*ids, END, *repeat(0, 100)])


def prompt_of(cluster: FakeCluster, text: Text) -> str:
    """Return what the worker was asked last."""
    return text.decode(cluster.worker("d0").started[-1].token_ids, skip_special_tokens=False)


def test_a_stop_string_or_token_is_part_of_the_text_when_asked_for(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            says(cluster, Text.load(model_dir).encode("one, two, three"))
            body = {"prompt": "count", "max_tokens": 40, "stop": ", t", "include_stop_str_in_output": True}
            kept = (await post(cluster, COMPLETIONS, body)).json["choices"][0]
            cut = (await post(cluster, COMPLETIONS, {**body, "include_stop_str_in_output": False})).json["choices"][0]
            ended = {**body, "stop": None, "stop_token_ids": [END], "skip_special_tokens": False}
            whole = (await post(cluster, COMPLETIONS, ended)).json["choices"][0]

            assert (kept["text"], kept["finish_reason"], kept["stop_reason"]) == ("one, t", "stop", ", t")
            assert cut["text"] == "one"
            assert whole["text"] == "one, two, three<|im_end|>"
            assert (whole["finish_reason"], whole["stop_reason"], cut["stop_reason"]) == ("stop", END, ", t")

    run(scenario())


@pytest.mark.parametrize("is_stream", [False, True])
def test_special_tokens_are_text_when_asked_for(model_dir: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster, wire(cluster) as connection:
            says(cluster, [*Text.load(model_dir).encode("a"), 2, *Text.load(model_dir).encode("b")])
            body = {"prompt": "x", "max_tokens": 3, "skip_special_tokens": False, "stream": is_stream}
            if is_stream:
                connection.send(COMPLETIONS, body)
                await connection.head()
                events = (await connection.rest())[:-1]
                shown = "".join(event(one)["choices"][0]["text"] for one in events)
            else:
                shown = (await post(cluster, COMPLETIONS, body)).json["choices"][0]["text"]
            skipped = (await post(cluster, COMPLETIONS, {**body, "skip_special_tokens": True, "stream": False})).json

            assert shown == f"a{Text.load(model_dir).token(2)}b"
            assert skipped["choices"][0]["text"] == "ab"

    run(scenario())


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "<|im_start|>assistant\nSure, <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>assistant\nSure, <|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nSure, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nSure, "),
    ],
)
def test_a_chat_ends_as_it_is_wanted(model_dir: Path, more: dict[str, Any], end: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            text, body = Text.load(model_dir), {**HELLO, "messages": [*HELLO["messages"], ASSISTANT], **more}
            assert (await post(cluster, CHAT, body)).status == 200
            told = (await post(cluster, "/tokenize", {"messages": body["messages"], **more})).json

            assert prompt_of(cluster, text) == f"<|im_start|>user\nhello<|im_end|>\n{end}"
            assert told["tokens"] == list(cluster.worker("d0").started[-1].token_ids)

    run(scenario())


def test_of_a_long_prompt_the_end_is_kept(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            ids = [5 + number % 200 for number in range(600)]  # the window is 512
            for kept, length in ((7, 7), (-1, 512 - 30), (-1, 512 - 30)):
                body = {"prompt": ids, "max_tokens": 30, "truncate_prompt_tokens": kept}
                usage = (await post(cluster, COMPLETIONS, body)).json["usage"]
                assert list(cluster.worker("d0").started[-1].token_ids) == ids[-length:]
                assert usage["prompt_tokens"] == length
            refused = await post(cluster, COMPLETIONS, {"prompt": ids, "truncate_prompt_tokens": 550})
            assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
            short = {"prompt": [5, 6], "max_tokens": 2, "truncate_prompt_tokens": 100}
            assert (await post(cluster, COMPLETIONS, short)).json["usage"]["prompt_tokens"] == 2

    run(scenario())


def test_prompts_with_another_salt_share_no_prefix(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            for more in ({}, {"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": "yours"}):
                await post(cluster, CHAT, {**HELLO, **more})

            none, mine, again, yours = (started.cache_salt for started in cluster.worker("d0").started)
            assert none == b""
            assert mine == again
            assert len({none, mine, yours}) == 3

    run(scenario())


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
def test_token_ids_are_returned_where_vllm_has_them(model_dir: Path, is_chat: bool) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            path, body = (CHAT, HELLO) if is_chat else (COMPLETIONS, {"prompt": ["hello", "you"], "max_tokens": 2})
            body = {**body, "return_token_ids": True}
            whole = (await post(cluster, path, body)).json
            connection.send(path, {**body, "stream": True})
            await connection.head()
            events = [event(one) for one in (await connection.rest())[:-1]]

            for index, choice in enumerate(whole["choices"]):
                prompt = (whole if is_chat else choice)["prompt_token_ids"]
                assert prompt in [list(started.token_ids) for started in cluster.worker("d0").started]
                assert len(choice["token_ids"]) == 2
                ours = [one for one in events if one["choices"][0]["index"] == index]
                assert [i for one in ours for i in one["choices"][0].get("token_ids", [])] == choice["token_ids"]
                assert (ours[0] if is_chat else ours[0]["choices"][0])["prompt_token_ids"] == prompt
            assert "token_ids" not in str((await post(cluster, path, {**body, "return_token_ids": None})).json)

    run(scenario())


def test_tokens_are_named_by_their_ids_in_logprobs(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
            chat = await post(cluster, CHAT, {**HELLO, **more, "logprobs": True, "top_logprobs": 1})
            completion = await post(cluster, COMPLETIONS, {"prompt": "hello", "max_tokens": 2, "logprobs": 1, **more})

            for choice, tokens in (
                (one := chat.json["choices"][0], [token["token"] for token in one["logprobs"]["content"]]),
                (one := completion.json["choices"][0], one["logprobs"]["tokens"]),
            ):
                assert tokens == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
            assert all(key.startswith("token_id:") for top in one["logprobs"]["top_logprobs"] for key in top)
            assert one["logprobs"]["text_offset"][0] == 0

    run(scenario())


def test_the_body_may_name_the_request_and_the_header_wins(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            named = await post(cluster, CHAT, {**HELLO, "request_id": "mine"})
            both = await post(cluster, CHAT, {**HELLO, "request_id": "mine"}, x_request_id="header")

            assert (named.headers["x-request-id"], named.json["id"]) == ("mine", "chatcmpl-mine")
            assert both.json["id"] == "chatcmpl-header"
            assert (await get(cluster, "/health")).status == 200

    run(scenario())


def test_the_reasoning_effort_is_a_variable_of_the_template() -> None:
    asked = {**HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    assert ChatRequest.model_validate(asked).template_arguments() == '{"reasoning_effort": "low", "x": 1}'


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_logprobs": 1},
        {"chat_template": "{{ messages }}"},
        {"allowed_token_ids": [5]},
        {"bad_words": ["no"]},
        {"logits_processors": ["x"]},
        {"kv_transfer_params": {"a": 1}},
        {"vllm_xargs": {"a": 1}},
        {"mm_processor_kwargs": {"a": 1}},
        {"thinking_token_budget": 5},
        {"documents": [{"a": "b"}]},
        {"use_beam_search": True},
        {"continue_final_message": True, "add_generation_prompt": True},
        {
            "continue_final_message": True,
            "messages": [{"role": "user", "content": "x"}, {"role": "user", "content": ""}],
        },
        {"cache_salt": ""},
        {"truncate_prompt_tokens": -2},
        {"request_id": "a b"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_is_not_done_is_refused_by_its_name(model_dir: Path, more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            refused = await post(cluster, CHAT, {**HELLO, **more})
            assert (refused.status, refused.error["param"]) == (400, next(iter(more)))

    run(scenario())


def test_grpc_has_the_same(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            says(cluster, Text.load(model_dir).encode("one, two"))
            asked = request("count to two", max_tokens=40, stop=[","])
            asked.text_options.keep_stop = True
            asked.text_options.prompt_tokens_kept = 3
            assert (await cluster.ask(asked)).text == "one,"
            assert len(cluster.worker("d0").started[0].token_ids) == 3

            messages = [inference_pb2.ChatMessage(role="assistant", content="Sure")]
            options = inference_pb2.TextOptions(continue_final_message=True)
            chat = inference_pb2.ChatMessages(messages=messages)
            tokens = await cluster.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat, text_options=options))
            assert Text.load(model_dir).decode(tokens.token_ids) == "assistant\nSure"

    run(scenario())
