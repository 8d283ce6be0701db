"""The fields of a message are counted on all levels, and no further than it takes."""

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from baton_pb.v1 import common_pb2, inference_pb2
from common.wire_fields import has_more_fields

ASKED = inference_pb2.GenerateRequest
IDS = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=range(100_000)))
TEXT = inference_pb2.GenerateRequest(text="hello " * 1000, sampling=common_pb2.SamplingParams(temperature=0.5, seed=7))
MESSAGES = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user")] * 300)


@pytest.mark.parametrize(
    ("message", "num"),
    [
        pytest.param(IDS, 2, id="a list of numbers is one"),
        pytest.param(TEXT, 4, id="text and parameters"),
        pytest.param(inference_pb2.GenerateRequest(chat=MESSAGES), 601, id="a chat"),
        pytest.param(
            inference_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(logit_bias={4: 1.0, 5: 2.0})),
            7,
            id="a map",
        ),
        pytest.param(inference_pb2.GenerateRequest(), 0, id="nothing"),
    ],
)
def test_fields_are_counted_on_all_levels(message: Message, num: int) -> None:
    data = message.SerializeToString()

    assert not has_more_fields(data, ASKED.DESCRIPTOR, num)
    assert num == 0 or has_more_fields(data, ASKED.DESCRIPTOR, num - 1)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        pytest.param(b"\x0a\x00" * 9, None, id="of a kind that nobody knows"),
        pytest.param(b"\x98\x06\x01" * 9, ASKED.DESCRIPTOR, id="unknown numbers"),
        pytest.param(b"\x0b" * 9, ASKED.DESCRIPTOR, id="groups"),
        pytest.param(b"\x0a\xff\x01" + b"\x00" * 500 + b"\x00" * 16, ASKED.DESCRIPTOR, id="rubbish"),
    ],
)
def test_what_is_not_known_counts_as_well(data: bytes, kind: Descriptor | None) -> None:
    assert has_more_fields(data, kind, 8)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a", b"\x0a\xff", b"\x0a\x7fx", b"\xff" * 80])
def test_what_is_cut_off_is_left_to_the_parser(data: bytes) -> None:
    assert not has_more_fields(data, ASKED.DESCRIPTOR, 8)
