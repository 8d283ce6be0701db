"""What a message says is either taken over exactly or refused with the field, the limit and the value."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_pb.v1 import common_pb2
from common.errors import InvalidRequestError
from engine.sampling_params import IDS_MAX, SamplingParams

Message = common_pb2.SamplingParams


def test_an_empty_message_takes_the_documented_defaults() -> None:
    params = SamplingParams.from_pb(Message())

    assert params == SamplingParams(temperature=1.0)
    assert not params.is_greedy


@given(
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0.125, 1, width=32),
    top_k=st.integers(0, 100),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 20),
    bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100, width=32), max_size=4),
)
def test_a_message_survives_the_way_there_and_back(
    temperature: float, top_p: float, top_k: int, seed: int, logprobs: int | None, bias: dict[int, float]
) -> None:
    message = Message(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, logprobs=logprobs, logit_bias=bias, max_tokens=5
    )

    params = SamplingParams.from_pb(message, 100)

    assert SamplingParams.from_pb(params.to_pb(), 100) == params
    assert (params.temperature, params.seed, dict(params.logit_bias)) == (temperature, seed, bias)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(Message(max_tokens=0), "max_tokens must be at least 1, got 0", id="no tokens"),
        pytest.param(Message(temperature=math.nan), r"temperature must be in \[0, 100\], got nan", id="nan"),
        pytest.param(Message(temperature=-0.5), r"temperature must be in \[0, 100\], got -0.5", id="negative"),
        pytest.param(Message(temperature=math.inf), "temperature must be in", id="infinite"),
        pytest.param(Message(top_p=0), r"top_p must be in \(0, 1\], got 0.0", id="top_p 0"),
        pytest.param(Message(top_p=1.5), "top_p must be in", id="top_p above 1"),
        pytest.param(Message(min_p=-1), "min_p must be in", id="min_p"),
        pytest.param(Message(repetition_penalty=0), "repetition_penalty must be above 0", id="repetition"),
        pytest.param(Message(presence_penalty=math.nan), "presence_penalty must be in", id="presence"),
        pytest.param(Message(frequency_penalty=math.inf), "frequency_penalty must be in", id="frequency"),
        pytest.param(Message(logprobs=21), "logprobs must be at most 20, got 21", id="logprobs"),
        pytest.param(Message(min_tokens=3, max_tokens=2), "min_tokens is 3, more than max_tokens 2", id="min over max"),
        pytest.param(Message(stop_token_ids=[100]), "stop_token_ids must name tokens below 100, got 100", id="stop id"),
        pytest.param(Message(logit_bias={100: 1.0}), "logit_bias must name tokens below 100, got 100", id="bias id"),
        pytest.param(Message(logit_bias={1: math.nan}), r"logit_bias\[1\] must be in", id="bias nan"),
        pytest.param(Message(stop_token_ids=range(IDS_MAX + 1)), "at most 1024 entries", id="too many"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(message: common_pb2.SamplingParams, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams.from_pb(message, 100)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams.from_pb(Message(temperature=1e-6)).is_greedy


def test_only_greedy_rules_that_ask_for_nothing_but_the_token_are_plain() -> None:
    plain: list[dict[str, Any]] = [{}, {"max_tokens": 3, "seed": 5, "top_p": 0.5, "ignore_eos": True, "min_tokens": 2}]
    others: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 0.0}},
        {"logprobs": 0},
        {"constraint": "{}"},
    ]

    assert [SamplingParams(**rules).is_plain for rules in plain + others] == [True] * 2 + [False] * 7
