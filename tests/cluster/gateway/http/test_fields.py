"""The extension fields of a body reach the message to the cluster as they are meant."""

from typing import Any

import pytest

from baton_pb.v1 import common_pb2
from cluster.gateway.http.chat import ChatRequest
from cluster.gateway.http.completions import CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("high", common_pb2.PRIORITY_HIGH),
        ("low", common_pb2.PRIORITY_LOW),
        (0, common_pb2.PRIORITY_NORMAL),
        (-3, common_pb2.PRIORITY_HIGH),
        (1, common_pb2.PRIORITY_LOW),
        (None, common_pb2.PRIORITY_UNSPECIFIED),
    ],
)
def test_a_class_is_given_by_name_or_by_vllms_number(given: Any, expected: int) -> None:
    assert ChatRequest.model_validate({**CHAT, "priority": given}).to_pb().priority == expected


def test_targets_reach_both_kinds_of_requests() -> None:
    targets = {"ttft_target_s": 0.5, "tpot_target_s": 1}
    chat = ChatRequest.model_validate({**CHAT, **targets}).to_pb()
    completion = CompletionRequest.model_validate({"prompt": [1, 2], **targets})

    for message in (chat, completion.to_pb(completion.prompts[0])):
        assert (message.ttft_target_s, message.tpot_target_s) == (0.5, 1.0)
    assert not ChatRequest.model_validate(CHAT).to_pb().HasField("ttft_target_s")
