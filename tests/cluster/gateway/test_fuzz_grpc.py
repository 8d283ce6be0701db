"""No message that a client can send ends a call with INTERNAL or UNKNOWN, and none harms the next one."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from baton_pb.kserve import inference_pb2 as kserve_pb2
from baton_pb.v1 import admin_pb2, common_pb2, inference_pb2, router_pb2
from cluster.tenants import key_file
from tests.cluster.gateway.any_message import TimeIsUpError, any_message
from tests.cluster.gateway.conftest import Search
from tests.cluster.running_cluster import running_cluster

EXAMPLES = 120
FORBIDDEN = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
SAMPLING = common_pb2.SamplingParams(max_tokens=4)


def infer_request() -> kserve_pb2.ModelInferRequest:
    made = kserve_pb2.ModelInferRequest(model_name="fake")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    return made


CALLS: list[tuple[str, Message, bool]] = [
    ("/baton.v1.Inference/Generate", inference_pb2.GenerateRequest(text="hello", sampling=SAMPLING), False),
    ("/baton.v1.Inference/Tokenize", inference_pb2.TokenizeRequest(text="hello"), False),
    ("/baton.v1.Inference/Detokenize", inference_pb2.DetokenizeRequest(token_ids=[5, 6]), False),
    ("/baton.v1.Inference/ListModels", inference_pb2.ListModelsRequest(), False),
    ("/inference.GRPCInferenceService/ModelInfer", infer_request(), False),
    ("/inference.GRPCInferenceService/ModelStreamInfer", infer_request(), True),
    ("/inference.GRPCInferenceService/ModelMetadata", kserve_pb2.ModelMetadataRequest(name="fake"), False),
    ("/inference.GRPCInferenceService/ModelReady", kserve_pb2.ModelReadyRequest(name="fake"), False),
    ("/inference.GRPCInferenceService/ServerLive", kserve_pb2.ServerLiveRequest(), False),
    ("/inference.GRPCInferenceService/ServerReady", kserve_pb2.ServerReadyRequest(), False),
    ("/inference.GRPCInferenceService/ServerMetadata", kserve_pb2.ServerMetadataRequest(), False),
    ("/baton.v1.Admin/GetStatus", admin_pb2.GetStatusRequest(), False),
    ("/baton.v1.Admin/Explain", router_pb2.ExplainRequest(request_id="mine"), False),
]
NOT_THERE = {"/baton.v1.Admin/Explain"}
"""Calls that ask for something that nobody has made."""
OPEN = ("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady")
"""Calls that need no key."""


def code_of(
    channel: grpc.Channel, method: str, data: list[bytes], is_stream: bool, shown: str | None = None
) -> grpc.StatusCode:
    """Send bytes, with an authorization if there is one, and return how the call ended."""
    metadata = () if shown is None else (("authorization", shown),)
    call: Any
    if is_stream:
        call = channel.stream_stream(method, None, None)(iter(data), timeout=20, metadata=metadata)
    else:
        call = channel.unary_stream(method, None, None)(data[0], timeout=20, metadata=metadata)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = call.code()
    return code


class Codes(NamedTuple):
    """How calls ended, by what they showed."""

    known: Counter[grpc.StatusCode]
    strange: Counter[grpc.StatusCode]


def codes_of(channel: grpc.Channel, call: tuple[str, Message, bool], search: Search, key: str | None = None) -> Codes:
    """Send what comes to hypothesis' mind, with the key that there is, or with one that is none."""
    method, base, is_stream = call
    codes = Codes(Counter(), Counter())
    deadline = time.monotonic() + search.seconds_max
    data = st.one_of(any_message(base).map(lambda made: made.SerializeToString()), st.binary(max_size=40))
    several = st.lists(data, min_size=1, max_size=3 if is_stream else 1)
    right = None if key is None else f"Bearer {key}"
    shown = st.just(right) if key is None else st.one_of(st.just(right), strange_keys(key))

    @given(several, shown)
    @search.settings(EXAMPLES if key is None else EXAMPLES // 3)
    def ask(sent: list[bytes], shown: str | None) -> None:
        if time.monotonic() > deadline:
            raise TimeIsUpError
        code = code_of(channel, method, sent, is_stream, shown)
        (codes.known if shown == right else codes.strange)[code] += 1
        assert code not in FORBIDDEN

    with suppress(TimeIsUpError):
        ask()
    return codes


def strange_keys(key: str) -> st.SearchStrategy[str]:
    """Return what is no key of that cluster: other words, other schemes, and the key, cut or with something to it."""
    printable = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=100)
    cut = st.integers(0, len(key) - 1).map(lambda end: f"Bearer {key[:end]}")
    longer = printable.filter(bool).map(lambda more: f"Bearer {key}{more}")
    return st.one_of(printable, printable.map("Bearer {}".format), printable.map("Basic {}".format), cut, longer)


def test_no_message_ends_a_call_in_a_way_that_is_the_servers_fault(model_dir: Path, search: Search) -> None:
    with running_cluster(model_dir) as cluster, grpc.insecure_channel(cluster.gateway.grpc_address) as channel:
        for method, base, is_stream in CALLS:
            codes = codes_of(channel, (method, base, is_stream), search).known

            assert codes[grpc.StatusCode.INVALID_ARGUMENT], method
            right = grpc.StatusCode.NOT_FOUND if method in NOT_THERE else grpc.StatusCode.OK
            assert code_of(channel, method, [base.SerializeToString()], is_stream) is right


def test_whatever_is_shown_as_a_key_lets_nobody_in_but_the_key(model_dir: Path, tmp_path: Path, search: Search) -> None:
    keys = tmp_path / "keys.yaml"
    admin, user = (key_file.add_key(keys, "mine", role, {}).key for role in ("admin", "user"))
    with (
        running_cluster(model_dir, keys_file=keys, admin_key=admin) as cluster,
        grpc.insecure_channel(cluster.gateway.grpc_address) as channel,
    ):
        for call in CALLS:
            method = call[0]
            codes = codes_of(channel, call, search, user)

            assert sum(codes.strange.values())
            assert sum(codes.known.values())
            if method not in OPEN:
                assert set(codes.strange) == {grpc.StatusCode.UNAUTHENTICATED}, method
                is_closed = method.startswith("/baton.v1.Admin/")
                assert is_closed == (set(codes.known) == {grpc.StatusCode.PERMISSION_DENIED}), method
                assert is_closed or not codes.known.keys() & REFUSED, method
