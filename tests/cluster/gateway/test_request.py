"""Every bad request is refused at the door, with the limit and the value in its words."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.chat import ChatPrompt
from cluster.gateway.limits import Limits
from cluster.gateway.request import (
    TextPrompt,
    TokenPrompt,
    check_window,
    request_from_pb,
)
from cluster.service_level import Priority, ServiceLevel
from common.errors import InvalidRequestError, NotFoundError

LIMITS = Limits(model_id="m", context_tokens=100, vocab_tokens=320, prompt_tokens_max=99)


def parse(message: inference_pb2.GenerateRequest) -> Any:
    return request_from_pb(message, LIMITS, "made-here", lambda: 77)


def with_sampling(**sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hi", sampling=common_pb2.SamplingParams(**sampling))


def bad_priority() -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(text="x")
    message.priority = 9  # type: ignore[assignment]  # as a newer client might send
    return message


def chat(*messages: tuple[str, str]) -> inference_pb2.GenerateRequest:
    listed = [inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatMessages(messages=listed))


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        pytest.param({"max_tokens": 0}, "max_tokens must be at least 1, got 0", id="no token"),
        pytest.param({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, 4, got 5", id="min"),
        pytest.param({"min_tokens": 100}, "min_tokens must be below the context window, 100, got 100", id="min window"),
        pytest.param({"temperature": math.nan}, r"temperature must be in \[0, 100\], got nan", id="nan"),
        pytest.param({"temperature": -1.0}, r"temperature must be in \[0, 100\], got -1", id="negative"),
        pytest.param({"temperature": math.inf}, r"temperature must be in \[0, 100\], got inf", id="infinite"),
        pytest.param({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0", id="top_p zero"),
        pytest.param({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5", id="top_p large"),
        pytest.param({"top_p": math.nan}, "top_p must be in", id="top_p nan"),
        pytest.param({"min_p": -0.5}, r"min_p must be in \[0, 1\], got -0.5", id="min_p"),
        pytest.param({"repetition_penalty": 0.0}, r"repetition_penalty must be in \(0, 100\], got 0", id="repetition"),
        pytest.param({"presence_penalty": 101.0}, "presence_penalty must be in", id="presence"),
        pytest.param({"frequency_penalty": -math.inf}, "frequency_penalty must be in", id="frequency"),
        pytest.param({"logprobs": 21}, "logprobs must be at most 20, got 21", id="logprobs"),
        pytest.param({"stop": ["x"] * 17}, "stop must have at most 16 strings, got 17", id="stop count"),
        pytest.param({"stop": [""]}, r"stop\[0\] must have 1 to 256 characters, got 0", id="stop empty"),
        pytest.param({"stop": ["x" * 257]}, "1 to 256 characters, got 257", id="stop long"),
        pytest.param({"stop_token_ids": [320]}, "stop_token_ids must be below 320, got 320", id="stop id"),
        pytest.param({"stop_token_ids": [1] * 1025}, "at most 1024 entries, got 1025", id="stop ids"),
        pytest.param({"logit_bias": {400: 1.0}}, "logit_bias must be below 320, got 400", id="bias id"),
        pytest.param({"logit_bias": {4: math.nan}}, r"logit_bias\[4\] must be in", id="bias nan"),
    ],
)
def test_a_sampling_field_out_of_range_is_named(sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        parse(with_sampling(**sampling))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(inference_pb2.GenerateRequest(), "prompt is missing", id="no prompt"),
        pytest.param(inference_pb2.GenerateRequest(text=""), "prompt is empty", id="empty text"),
        pytest.param(inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()), "prompt is empty", id="no ids"),
        pytest.param(chat(), "chat has no messages", id="no messages"),
        pytest.param(chat(("system", ""), ("user", "")), "no chat message has any content", id="nothing said"),
        pytest.param(chat(("user", "a"), ("", "b")), r"messages\[1\].role is missing", id="no role"),
        pytest.param(
            chat(*[("user", "x")] * 4097), "messages must have at most 4096 entries, got 4097", id="many messages"
        ),
        pytest.param(
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 320])),
            "token_ids must be below 320, got 320",
            id="id out of vocabulary",
        ),
        pytest.param(
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[999] * 100)),
            "prompt has 100 tokens, at most 99 are possible",
            id="too many ids",
        ),
        pytest.param(
            inference_pb2.GenerateRequest(text="x" * 3_169),
            "prompt has 3169 characters, more than 3168",
            id="long text",
        ),
        pytest.param(
            inference_pb2.GenerateRequest(text="x", request_id="x" * 129),
            "at most 128 characters, got 129",
            id="long id",
        ),
        pytest.param(inference_pb2.GenerateRequest(text="x", request_id="a\nb"), "printable ASCII", id="odd id"),
        pytest.param(inference_pb2.GenerateRequest(text="x", ttft_target_s=0), r"ttft_target_s must be", id="no time"),
        pytest.param(inference_pb2.GenerateRequest(text="x", tpot_target_s=math.nan), "tpot_target_s", id="no number"),
        pytest.param(bad_priority(), "priority must be high, normal or low, got number 9", id="no class"),
    ],
)
def test_a_bad_prompt_or_id_is_named(message: inference_pb2.GenerateRequest, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        parse(message)


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="model 'gpt' is not served here, only 'm'"):
        parse(inference_pb2.GenerateRequest(text="x", model="gpt"))


def test_a_good_request_comes_out_as_the_worker_needs_it() -> None:
    request = parse(with_sampling(stop=["a", "b"], temperature=0.5, max_tokens=3))

    assert request.request_id == "made-here"
    assert request.stop == ("a", "b")
    assert request.sampling == common_pb2.SamplingParams(temperature=0.5, max_tokens=3, seed=77)
    assert request.prompt == TextPrompt("hi")


def test_the_clients_seed_stands() -> None:
    request = parse(with_sampling(seed=0))

    assert request.sampling.seed == 0
    assert not request.sampling.HasField("temperature")


def test_the_class_and_the_targets_are_kept_and_nobody_must_give_them() -> None:
    message = inference_pb2.GenerateRequest(
        text="x", priority=common_pb2.PRIORITY_LOW, ttft_target_s=0.5, tpot_target_s=0.05
    )
    request = parse(message)

    assert request.level == ServiceLevel(Priority.LOW, 0.5, 0.05)
    assert parse(inference_pb2.GenerateRequest(text="x")).level == ServiceLevel(Priority.NORMAL, None, None)


def test_each_kind_of_prompt_is_kept_apart() -> None:
    ids = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2]), model="m")

    assert parse(ids).prompt == TokenPrompt((1, 2))
    assert parse(chat(("user", "hi"))).prompt == ChatPrompt(({"role": "user", "content": "hi"},))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        pytest.param(60, None, 40, id="the rest of the window"),
        pytest.param(60, 40, 40, id="exactly the rest"),
        pytest.param(99, None, 1, id="room for one"),
        pytest.param(60, 41, "max_tokens must be at most 40 with a prompt of 60 tokens", id="one too many"),
        pytest.param(100, None, "prompt has 100 tokens, at most 99 are possible", id="no room"),
        pytest.param(0, None, "prompt is empty", id="empty"),
    ],
)
def test_prompt_and_output_share_the_window(num_prompt: int, max_tokens: int | None, expected: int | str) -> None:
    if isinstance(expected, int):
        assert check_window(num_prompt, max_tokens, LIMITS) == expected
        return
    with pytest.raises(InvalidRequestError, match=expected):
        check_window(num_prompt, max_tokens, LIMITS)


@given(st.binary(max_size=60))
def test_any_bytes_that_parse_are_a_request_or_a_typed_refusal(data: bytes) -> None:
    message = inference_pb2.GenerateRequest()
    try:
        message.ParseFromString(data)
    except Exception:
        return
    with contextlib.suppress(InvalidRequestError, NotFoundError):
        parse(message)
