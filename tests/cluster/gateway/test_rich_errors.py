"""Errors carry the details that gRPC's own tools read: which field is wrong, when to retry, what is used up."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.tenants import key_file
from common.errors import OverloadedError
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, request, run


async def status_of(call: Any) -> status_pb2.Status:
    """Return the status that a stream or a call ends with, as the package `grpcio-status` reads it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (anext(aiter(call)) if hasattr(call, "__aiter__") else call)
    ended: Any = caught.value  # has a call's methods
    status = rpc_status.from_call(ended)
    assert status is not None
    return status


def unpacked(status: status_pb2.Status, kind: Any) -> Any:
    [found] = [detail for detail in status.details if detail.Is(kind.DESCRIPTOR)]
    message = kind()
    found.Unpack(message)
    return message


def chat(*roles: str) -> inference_pb2.GenerateRequest:
    made = inference_pb2.GenerateRequest()
    for role in roles:
        made.chat.messages.add(role=role, content="x")
    return made


def batch(*prompts: Any, n: int = 0, **sampling: Any) -> inference_pb2.GenerateRequest:
    made = inference_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(**sampling), n=n)
    made.batch.SetInParent()
    for prompt in prompts:
        made.batch.prompts.add(**prompt)
    return made


TOO_MUCH = batch(*[{"text": "x"}] * 20, stop=["x" * 1_000_000])


def test_a_wrong_field_is_named_by_its_path_in_the_message(model_dir: Path) -> None:
    cases: list[tuple[inference_pb2.GenerateRequest, str]] = [
        (request(temperature=-1.0), "sampling.temperature"),
        (request(stop=["a", ""]), "sampling.stop[1]"),
        (request(logit_bias={4: 1e9}), "sampling.logit_bias[4]"),
        (request("x" * 200_000), "text"),
        (request([1, 999]), "token_ids"),
        (chat("user", ""), "chat.messages[1].role"),
        (inference_pb2.GenerateRequest(), "prompt"),
        (inference_pb2.GenerateRequest(text="x", n=99), "n"),
        (inference_pb2.GenerateRequest(text="x", request_id="a b"), "request_id"),
        (request([5] * 30, max_tokens=500), "sampling.max_tokens"),
        (batch(), "batch.prompts"),
        (batch({"text": "x"}, n=99), "n"),
        (batch(*[{"text": "x"}] * 43, n=3), "batch"),
        (TOO_MUCH, "batch"),
        (batch({"text": "x"}, {}), "batch.prompts[1]"),
        (batch({"text": "x"}, {"text": ""}), "batch.prompts[1]"),
        (batch({"text": "x"}, {"token_ids": {"ids": [999]}}, n=2), "batch.prompts[1].token_ids"),
        (batch({"text": "x"}, temperature=-1.0), "sampling.temperature"),
    ]

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            for message, path in cases:
                status = await status_of(cluster.call(message))
                [violation] = unpacked(status, error_details_pb2.BadRequest).field_violations
                assert (violation.field, violation.description) == (path, status.message)

            status = await status_of(cluster.stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * 200_000)))
            assert unpacked(status, error_details_pb2.BadRequest).field_violations[0].field == "text"

    run(scenario())


def test_an_overload_says_when_to_retry_and_what_is_used_up(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, retries_max=0) as cluster:
            cluster.worker("d0").refuse(OverloadedError("need 4 blocks, 1 available", 2.5))

            status = await status_of(cluster.call(request()))

            delay = unpacked(status, error_details_pb2.RetryInfo).retry_delay
            assert delay.ToMilliseconds() == 2500
            [violation] = unpacked(status, error_details_pb2.QuotaFailure).violations
            assert (violation.subject, violation.description) == ("cluster", "need 4 blocks, 1 available")

    run(scenario())


def test_a_tenants_own_limit_is_the_tenants_quota(model_dir: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    admin = key_file.add_key(keys, "ops", "admin", {}).key
    key = key_file.add_key(keys, "acme", "user", {"concurrent_max": 1}).key

    async def scenario() -> None:
        async with fake_cluster(model_dir, keys_file=keys, admin_key=admin) as cluster:
            status = await status_of(cluster.call(batch({"text": "x"}, {"text": "y"}), key=key))

            [violation] = unpacked(status, error_details_pb2.QuotaFailure).violations
            assert (violation.subject, violation.description) == ("tenant:acme", status.message)

    run(scenario())


@pytest.mark.parametrize("character", ["x", "\N{SLIGHTLY SMILING FACE}", "\x01", "é"])
def test_details_that_quote_a_long_text_still_fit_into_a_status(model_dir: Path, character: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            message = inference_pb2.GenerateRequest(text="x", request_id=character * 100_000)

            for _ in range(20):  # beyond its limit gRPC refuses some of them, at random
                status = await status_of(cluster.call(message))
                assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]

    run(scenario())


def test_a_synchronous_client_reads_the_same(model_dir: Path) -> None:
    def ask(address: str) -> Any:
        with grpc.insecure_channel(address) as channel:
            call: Any = channel.unary_stream(
                "/baton.v1.Inference/Generate", inference_pb2.GenerateRequest.SerializeToString, None
            )(request(top_p=2.0), timeout=10)
            with pytest.raises(grpc.RpcError):
                list(call)
            return rpc_status.from_call(call)

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            status = await asyncio.to_thread(ask, cluster.gateway.grpc_address)

            assert unpacked(status, error_details_pb2.BadRequest).field_violations[0].field == "sampling.top_p"

    run(scenario())


def test_channelz_is_not_served(model_dir: Path) -> None:
    async def ask(cluster: FakeCluster) -> grpc.StatusCode:
        call: Any = cluster.channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=10)
        return caught.value.code()

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            assert await ask(cluster) is grpc.StatusCode.UNIMPLEMENTED

    run(scenario())
