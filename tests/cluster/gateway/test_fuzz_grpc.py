"""No message that a client can send ends a call with INTERNAL or UNKNOWN, and none harms the next one."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton_pb.kserve import inference_pb2 as kserve_pb2
from baton_pb.v1 import common_pb2, inference_pb2
from tests.cluster.gateway.any_message import TimeIsUpError, any_message
from tests.cluster.running_cluster import running_cluster

EXAMPLES = 120
SECONDS_MAX = 2.5
"""For each kind of call; what is not tried then is not tried."""
FORBIDDEN = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
SAMPLING = common_pb2.SamplingParams(max_tokens=4)


def infer_request() -> kserve_pb2.ModelInferRequest:
    made = kserve_pb2.ModelInferRequest(model_name="fake")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    return made


CALLS: list[tuple[str, Message, bool]] = [
    ("/baton.v1.Inference/Generate", inference_pb2.GenerateRequest(text="hello", sampling=SAMPLING), False),
    ("/baton.v1.Inference/Tokenize", inference_pb2.TokenizeRequest(text="hello"), False),
    ("/baton.v1.Inference/Detokenize", inference_pb2.DetokenizeRequest(token_ids=[5, 6]), False),
    ("/inference.GRPCInferenceService/ModelInfer", infer_request(), False),
    ("/inference.GRPCInferenceService/ModelStreamInfer", infer_request(), True),
    ("/inference.GRPCInferenceService/ModelMetadata", kserve_pb2.ModelMetadataRequest(name="fake"), False),
    ("/inference.GRPCInferenceService/ModelReady", kserve_pb2.ModelReadyRequest(name="fake"), False),
]


def code_of(channel: grpc.Channel, method: str, data: list[bytes], is_stream: bool) -> grpc.StatusCode:
    """Send bytes and return how the call ended."""
    call: Any
    if is_stream:
        call = channel.stream_stream(method, None, None)(iter(data), timeout=20)
    else:
        call = channel.unary_stream(method, None, None)(data[0], timeout=20)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = call.code()
    return code


def codes_of(channel: grpc.Channel, method: str, base: Message, is_stream: bool) -> Counter[grpc.StatusCode]:
    """Send what comes to hypothesis' mind and return how the calls ended."""
    codes = Counter[grpc.StatusCode]()
    deadline = time.monotonic() + SECONDS_MAX
    data = st.one_of(any_message(base).map(lambda made: made.SerializeToString()), st.binary(max_size=40))

    several = st.lists(data, min_size=1, max_size=3 if is_stream else 1)

    @given(several)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(sent: list[bytes]) -> None:
        if time.monotonic() > deadline:
            raise TimeIsUpError
        code = code_of(channel, method, sent, is_stream)
        codes[code] += 1
        assert code not in FORBIDDEN

    with suppress(TimeIsUpError):
        ask()
    return codes


def test_no_message_ends_a_call_in_a_way_that_is_the_servers_fault(model_dir: Path) -> None:
    with running_cluster(model_dir) as cluster, grpc.insecure_channel(cluster.gateway.grpc_address) as channel:
        for method, base, is_stream in CALLS:
            codes = codes_of(channel, method, base, is_stream)

            assert codes[grpc.StatusCode.INVALID_ARGUMENT], method
            assert code_of(channel, method, [base.SerializeToString()], is_stream) is grpc.StatusCode.OK
