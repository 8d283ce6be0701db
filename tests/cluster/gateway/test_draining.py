"""While a gateway drains, running requests go on and new ones are told to come back, over each API, until the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_pb.kserve import inference_pb2 as kserve_pb2
from baton_pb.kserve import inference_pb2_grpc as kserve_pb2_grpc
from baton_pb.v1 import inference_pb2
from common.errors import WorkerLostError
from common.rich_status import DETAILS_KEY
from common.status import typed_rpc_errors
from tests.cluster.fake_cluster import LIMIT_S, FakeCluster, fake_cluster, request, run, start_again, until
from tests.cluster.gateway.http.wire import Wire, event, get, post, wire

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


@asynccontextmanager
async def draining(model_dir: Path) -> AsyncIterator[tuple[FakeCluster, "asyncio.Task[None]", Wire, Any]]:
    """Give a gateway that stops with a stream of each API under way; each ends when its worker may step."""
    async with fake_cluster(model_dir) as cluster, wire(cluster) as stream:
        cluster.worker("d0").may_step.clear()
        stream.send("/v1/chat/completions", {**CHAT, "stream": True})
        call = cluster.call(request(max_tokens=3))
        await until(lambda: len(cluster.worker("d0").started) == 2, "not started")
        stopping = asyncio.create_task(cluster.gateway.stop(LIMIT_S))
        while (await get(cluster, "/ready")).status == 200:
            pass
        yield cluster, stopping, stream, call
        cluster.worker("d0").may_step.set()
        await stopping
        await start_again(cluster, model_dir)


def test_new_requests_are_told_to_come_back_and_running_ones_go_on(model_dir: Path) -> None:
    async def scenario() -> None:
        async with draining(model_dir) as (cluster, stopping, stream, call):
            refused = await post(cluster, "/v1/chat/completions", CHAT)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))
            async with grpc.aio.insecure_channel(cluster.gateway.grpc_address) as another:
                kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(another)
                with pytest.raises(WorkerLostError, match="the gateway stops"), typed_rpc_errors():
                    await kserve.ModelInfer(kserve_pb2.ModelInferRequest(model_name="fake"))
            cluster.worker("d0").may_step.set()
            await stream.head()
            *_, last, done = await stream.rest()
            responses = [response async for response in call]
            await stopping

            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert refused.error["type"] == "service_unavailable_error"
            assert refused.error["message"] == "the gateway stops"
            assert refused.headers["connection"] == "close"
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert _retry_delay_s(caught.value) == 1.0
            assert event(last)["choices"][0]["finish_reason"] == "length"
            assert done == "data: [DONE]"
            assert responses[-1].HasField("finished")

    run(scenario())


def test_operators_may_watch_and_balancers_see_that_it_is_alive_but_not_ready(model_dir: Path) -> None:
    async def scenario() -> None:
        async with draining(model_dir) as (cluster, _, _, _):
            health = health_pb2_grpc.HealthStub(cluster.channel)
            kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(cluster.channel)

            assert (await get(cluster, "/health")).status == 200
            assert (await get(cluster, "/metrics")).status == 200
            assert (await get(cluster, "/ready")).status == 503
            assert (await cluster.status()).gateway.running_requests == 2
            check = await health.Check(health_pb2.HealthCheckRequest())
            assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not (await kserve.ServerReady(kserve_pb2.ServerReadyRequest())).ready

    run(scenario())


def test_losing_patience_ends_streams_with_an_error_of_ours(model_dir: Path) -> None:
    async def scenario() -> None:
        async with draining(model_dir) as (cluster, stopping, stream, call):
            await cluster.gateway.stop(0.0)
            await stopping

            with pytest.raises(WorkerLostError, match="the gateway stops"), typed_rpc_errors():
                async for _ in call:
                    pass
            refusal = await stream.response()
            assert refusal.error["message"] == "the gateway stops"
            cluster.worker("d0").may_step.set()

    run(scenario())


def test_a_stream_of_triton_gets_nothing_new_answered_and_does_not_hold_the_end_up(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            kserve: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(cluster.channel)
            stream, asked = kserve.ModelStreamInfer(), kserve_pb2.ModelInferRequest(model_name="fake")
            await stream.write(asked)
            first = await stream.read()
            stopping = asyncio.create_task(cluster.gateway.stop(LIMIT_S))
            await asyncio.sleep(0)
            await stream.write(asked)
            second = await stream.read()
            with pytest.raises(WorkerLostError, match="the gateway stops"), typed_rpc_errors():
                await stream.read()
            await stopping

            assert first.error_message.startswith("text_input is missing")
            assert second.error_message == "the gateway stops"
            await start_again(cluster, model_dir)

    run(scenario())


def _retry_delay_s(error: Any) -> float:  # the stubs know no metadata of errors
    [details] = [value for key, value in error.trailing_metadata() if key == DETAILS_KEY]
    status = status_pb2.Status.FromString(details)
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    return float(retry.retry_delay.seconds)
