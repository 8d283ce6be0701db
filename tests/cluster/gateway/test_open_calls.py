"""Calls and connections cost their own client only: who opens many, or does not read, keeps nobody else out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton_pb.v1 import inference_pb2, inference_pb2_grpc
from cluster.tenants import key_file
from common.errors import OverloadedError, WorkerLostError
from common.status import typed_rpc_errors
from common.turnstile import Turnstile
from loadtest.bench.gateway_h2 import H2Connection
from tests.cluster.fake_cluster import LIMIT_S, FakeCluster, bearer, fake_cluster, request, run, until
from tests.cluster.gateway.http.wire import post, wire

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
"""Else channels of one process share connections."""
SMALL_WINDOW = [*OWN_CONNECTION, ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
GENERATE, TOKENIZE = "/baton.v1.Inference/Generate", "/baton.v1.Inference/Tokenize"


@asynccontextmanager
async def two_tenants(model_dir: Path, folder: Path, **settings: Any) -> AsyncIterator[tuple[FakeCluster, str, str]]:
    """Give a cluster and the keys of two tenants."""
    path = folder / "keys.yaml"
    admin, mine, theirs = (
        key_file.add_key(path, tenant, "admin" if tenant == "ops" else "user", {}).key for tenant in ("ops", "a", "b")
    )
    async with fake_cluster(model_dir, keys_file=path, admin_key=admin, **settings) as cluster:
        yield cluster, mine, theirs


def test_a_client_that_takes_no_messages_loses_its_request_and_reads_why(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, http={"unread_s": 0.3}) as cluster:
            cluster.worker("d0").step_s = 0.02
            async with grpc.aio.insecure_channel(cluster.gateway.grpc_address, options=SMALL_WINDOW) as channel:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                deaf = stub.Generate(request("hello", max_tokens=480, logprobs=20, ignore_eos=True))
                await until(lambda: cluster.worker("d0").num_running == 1, "not started")

                await until(lambda: cluster.gateway._counts.running == 0, "it runs on")

                assert len((await cluster.ask(request("hello", max_tokens=4))).token_ids) == 4
                with pytest.raises(OverloadedError, match=r"no message was taken for 0\.3 s"), typed_rpc_errors():
                    async for _ in deaf:
                        pass

    run(scenario())


def test_a_client_that_takes_nothing_at_all_loses_its_request_too(model_dir: Path) -> None:
    message = request("hello", max_tokens=400, ignore_eos=True).SerializeToString()

    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"unread_s": 0.2}) as cluster:
            cluster.worker("d0").step_s = 0.05
            deaf = await H2Connection.open(cluster.gateway.grpc_address, GENERATE, stream_window=0)
            deaf.call(message)
            await until(lambda: cluster.worker("d0").num_running == 1, "not started")

            await until(lambda: cluster.worker("d0").num_running == 0, "it runs on")

            assert cluster.gateway._counts.running == 0
            assert cluster.gateway._calls.num_taken == 1
            deaf.close()
            await until(lambda: cluster.gateway._calls.num_taken == 0, "calls are left")

    run(scenario())


def test_a_call_counts_until_its_client_has_taken_its_answer(model_dir: Path) -> None:
    message = inference_pb2.TokenizeRequest(text="hello").SerializeToString()

    async def scenario() -> None:
        async with fake_cluster(model_dir, calls_max=4) as cluster:
            deaf = await H2Connection.open(cluster.gateway.grpc_address, TOKENIZE, stream_window=0)
            for _ in range(3):
                deaf.call(message)
            await until(lambda: cluster.gateway._calls.num_taken == 3, "not taken in")
            await until(lambda: not cluster.gateway._guard._calls, "not answered")

            with pytest.raises(OverloadedError, match=r"address 127\.0\.0\.1 may have 2 of 4 calls"):
                await cluster.ask(request("hello"))

            deaf.close()
            await until(lambda: cluster.gateway._calls.num_taken == 0, "calls are left")
            await cluster.ask(request("hello"))

    run(scenario())


def test_one_tenant_cannot_open_all_grpc_calls(model_dir: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_tenants(model_dir, tmp_path, calls_max=8) as (cluster, mine, theirs):
            cluster.worker("d0").may_step.clear()
            calls = [cluster.call(request("hello"), key=mine) for _ in range(6)]
            await until(lambda: cluster.gateway._calls.num_taken == 6, "not open")

            with pytest.raises(OverloadedError, match="tenant a may have 4 of 8 calls"):
                await cluster.ask(request("hello"), key=mine)
            with typed_rpc_errors():
                await cluster.stub.ListModels(
                    inference_pb2.ListModelsRequest(), timeout=LIMIT_S, metadata=bearer(theirs)
                )

            for call in calls:
                call.cancel()
            cluster.worker("d0").may_step.set()

    run(scenario())


def test_one_tenant_cannot_have_all_http_requests(model_dir: Path, tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 2}

    async def scenario() -> None:
        async with two_tenants(model_dir, tmp_path, http={"connections_max": 16}) as (cluster, mine, theirs):
            requests = cluster.gateway._http._requests
            for _ in range(12):
                requests.take("tenant a")

            refused = await post(cluster, "/v1/completions", body, authorization=f"Bearer {mine}")
            served = await post(cluster, "/v1/completions", body, authorization=f"Bearer {theirs}")

            assert (refused.status, served.status) == (429, 200)
            assert "tenant a may have 8 of 16 HTTP requests" in refused.error["message"]
            for _ in range(12):
                requests.give_back("tenant a")

    run(scenario())


def test_a_grpc_connection_beyond_the_most_is_closed(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, grpc_connections_max=1) as cluster:
            await cluster.status()
            async with grpc.aio.insecure_channel(cluster.gateway.grpc_address, options=OWN_CONNECTION) as further:
                list_models: Any = further.unary_unary("/baton.v1.Inference/ListModels", None, None)
                with pytest.raises(WorkerLostError), typed_rpc_errors():
                    await list_models(b"", timeout=LIMIT_S)
            await cluster.status()

    run(scenario())


async def _nothing_before(end: asyncio.Event) -> AsyncIterator[bytes]:
    """Send nothing; gRPC reads it in a task that outlives a call which the server ends."""
    await end.wait()
    for message in tuple[bytes, ...]():
        yield message


def test_so_many_messages_and_large_bodies_of_one_client_arrive_at_once_and_the_others_wait(model_dir: Path) -> None:
    large = {"prompt": "hello", "user": "x" * 100_000, "max_tokens": 1}

    async def scenario() -> None:
        async with fake_cluster(model_dir, arriving_max=1) as cluster, wire(cluster) as http:
            arrivals, end = cluster.gateway._arrivals, asyncio.Event()
            generate: Any = cluster.channel.stream_stream(GENERATE, None, None)
            unsent = [generate(_nothing_before(end)) for _ in range(2)]
            await until(lambda: _waiting(arrivals) == 1, "the second does not wait")
            http.send("/v1/completions", large)
            await until(lambda: _waiting(arrivals) == 2, "the body does not wait")
            # Who waits takes nothing of others: a small body needs no place.
            assert (await post(cluster, "/v1/completions", {"prompt": "hello", "max_tokens": 1})).status == 200

            for call in unsent:
                call.cancel()
            end.set()

            assert (await http.response()).status == 200
            assert len((await cluster.ask(request("hello", max_tokens=2))).token_ids) == 2

    run(scenario())


def _waiting(turnstile: Turnstile) -> int:
    return sum(len(waiting) for waiting in turnstile._waiting.values())


def test_streams_of_requests_are_bounded_for_each_client(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, streams_max=1) as cluster:
            end = asyncio.Event()
            infer: Any = cluster.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
            first = infer(_nothing_before(end))
            await until(lambda: cluster.gateway._calls.num_taken == 1, "not open")
            with pytest.raises(OverloadedError, match=r"127\.0\.0\.1 may have 1 streams"), typed_rpc_errors():
                async for _ in infer(_nothing_before(end)):
                    pass
            first.cancel()
            await until(lambda: cluster.gateway._calls.num_taken == 0, "calls are left")
            again = infer(_nothing_before(end))
            await until(lambda: cluster.gateway._calls.num_taken == 1, "not open")
            again.cancel()
            end.set()

    run(scenario())


def test_a_hundred_requests_at_once_run_no_more_than_their_tenant_may(model_dir: Path, tmp_path: Path) -> None:
    key_file.add_key(tmp_path / "keys.yaml", "a", "user", {"concurrent_max": 5})
    body = {"prompt": "hello", "max_tokens": 2}

    async def scenario() -> None:
        async with two_tenants(model_dir, tmp_path) as (cluster, mine, _):
            worker = cluster.worker("d0")
            worker.may_step.clear()

            async def ask(number: int) -> bool:
                if number % 2:
                    answer = await post(cluster, "/v1/completions", body, authorization=f"Bearer {mine}")
                    return answer.status == 200
                try:
                    return bool(await cluster.ask(request("hello", max_tokens=2), key=mine))
                except OverloadedError:
                    return False

            asking = [asyncio.create_task(ask(number)) for number in range(100)]
            await until(lambda: sum(task.done() for task in asking) == 95, "not refused")
            await until(lambda: worker.num_running == 5, "not started")
            worker.may_step.set()

            assert sum(await asyncio.gather(*asking)) == 5

    run(scenario())
