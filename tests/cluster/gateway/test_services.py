"""The other calls: Tokenize, Detokenize, ListModels, GetStatus, health, reflection, and what is no message at all."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton_pb.v1 import inference_pb2
from cluster.fake_model import write_model
from cluster.gateway.server import GatewayServer
from common.config_doors import GatewayConfig
from common.errors import ConfigError, InvalidRequestError, NotFoundError, OverloadedError
from common.status import typed_rpc_errors
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, request, run, until


def test_tokenize_and_detokenize_are_inverse(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            asked = inference_pb2.TokenizeRequest(text="Grüße <|im_end|>", add_special_tokens=True)
            tokens = await cluster.stub.Tokenize(asked)
            back = await cluster.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))

            assert back.text == "Grüße <|im_end|>"
            assert tokens.tokens[-1] == "<|im_end|>"
            assert len(tokens.tokens) == len(tokens.token_ids)

    run(scenario())


def test_tokenize_renders_a_chat(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            asked = inference_pb2.TokenizeRequest()
            asked.chat.messages.add(role="user", content="hi")

            tokens = await cluster.stub.Tokenize(asked)

            assert "".join(tokens.tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    run(scenario())


def test_bad_texts_ids_and_models_are_refused(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            with pytest.raises(InvalidRequestError, match="prompt is missing"), typed_rpc_errors():
                await cluster.stub.Tokenize(inference_pb2.TokenizeRequest())
            with pytest.raises(NotFoundError), typed_rpc_errors():
                await cluster.stub.Tokenize(inference_pb2.TokenizeRequest(text="x", model="gpt"))
            with pytest.raises(InvalidRequestError, match="below 320, got 320"), typed_rpc_errors():
                await cluster.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[320]))

    run(scenario())


def test_the_model_is_listed_with_its_window(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            listed = await cluster.stub.ListModels(inference_pb2.ListModelsRequest())

            assert list(listed.models) == [
                inference_pb2.ModelInfo(id="fake", context_tokens=512, vocab_tokens=320, has_chat_template=True)
            ]

    run(scenario())


def test_status_tells_of_workers_router_gateway_and_model(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="round_robin") as cluster:
            await cluster.ask(request(max_tokens=1))
            with pytest.raises(NotFoundError):
                await cluster.ask(inference_pb2.GenerateRequest(text="x", model="gpt"))
            cluster.worker("d0").load.blocks_free = 7
            cluster.worker("d0").report()
            await until(lambda: cluster.router.status().workers[1].load.blocks_free == 7, "not reported")

            status = await cluster.status()

            assert [(worker.worker_id, worker.state) for worker in status.workers] == [("p0", "ready"), ("d0", "ready")]
            assert status.workers[1].load.blocks_free == 7
            assert status.workers[1].handshake.backend == "fake"
            assert (status.router.policy, status.router.placements_total) == ("round_robin", 1)
            assert status.gateway.requests_total == 2
            assert dict(status.gateway.errors_total) == {"NOT_FOUND": 1}
            assert status.gateway.address == cluster.gateway.grpc_address
            assert status.model.id == "fake"
            assert list(status.transports) == ["fake"]
            assert status.uptime_s > 0

    run(scenario())


async def health(cluster: FakeCluster, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(cluster.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def test_health_follows_the_router_for_inference_alone(model_dir: Path) -> None:
    async def scenario() -> None:
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        async with fake_cluster(model_dir) as cluster:
            await cluster.ask(request(max_tokens=1))
            for service in ("", "baton.v1.Inference", "baton.v1.Admin", "inference.GRPCInferenceService"):
                assert await health(cluster, service) == serving

            await cluster.router.stop()
            await until(lambda: not cluster.gateway._router._connected.is_set(), "still connected")
            assert await health(cluster, "baton.v1.Inference") == not_serving
            assert await health(cluster, "") == serving

            await cluster.restart_router()
            await cluster.all_ready()
            await cluster.ask(request(max_tokens=1))
            assert await health(cluster, "baton.v1.Inference") == serving

    run(scenario())


def test_reflection_lists_the_services(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            listed = await call.read()
            call.cancel()

            names = {service.name for service in listed.list_services_response.service}
            assert names >= {"baton.v1.Inference", "baton.v1.Admin", "grpc.health.v1.Health"}

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x1a\x02\xc3\x28", id="text that is no UTF-8"),
        pytest.param(b"\xff\xff\xff", id="no message"),
        pytest.param(b"\x1a\x7f", id="a message cut short"),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_bytes_that_are_no_message_are_invalid(model_dir: Path, data: bytes, method: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            call: Any = cluster.channel.unary_unary(f"/baton.v1.Inference/{method}", None, None)
            if method == "Tokenize":
                data_sent = data.replace(b"\x1a", b"\x12")
                with pytest.raises(InvalidRequestError, match="no valid message"), typed_rpc_errors():
                    await call(data_sent, timeout=5)
                return
            streaming: Any = cluster.channel.unary_stream(f"/baton.v1.Inference/{method}", None, None)
            with pytest.raises(InvalidRequestError, match="no valid message"), typed_rpc_errors():
                async for _ in streaming(data, timeout=5):
                    pass

    run(scenario())


def test_a_message_beyond_the_limit_is_refused_with_the_limit_and_one_below_passes(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, message_bytes_max=1_000_000) as cluster:
            with pytest.raises(OverloadedError, match="1000000"):
                await cluster.ask(request("x" * 1_000_100))
            with pytest.raises(InvalidRequestError, match="999900 characters"):
                await cluster.ask(request("x" * 999_900))

    run(scenario())


def test_a_message_of_64_megabytes_passes_where_that_is_configured(model_dir: Path) -> None:
    text = "x" * (64 << 20)

    async def scenario() -> None:
        async with fake_cluster(model_dir, message_bytes_max=65 << 20) as cluster:
            with pytest.raises(
                InvalidRequestError, match=f"{len(text)} characters"
            ):  # it was read: the window is small
                await cluster.ask(request(text))
        async with fake_cluster(model_dir) as cluster:
            with pytest.raises(OverloadedError, match=str(4 << 20)):
                await cluster.ask(request(text))

    run(scenario())


def test_ids_beyond_the_window_are_not_turned_into_text(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            window = (await cluster.status()).model.context_tokens
            stub = cluster.stub
            most = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[65] * window))
            assert len(most.text) == window
            with pytest.raises(InvalidRequestError, match=f"token_ids must be at most {window}"), typed_rpc_errors():
                await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[65] * (window + 1)))
            with pytest.raises(InvalidRequestError, match=f"tokens must be at most {window}"), typed_rpc_errors():
                await stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * (window + 1)))

    run(scenario())


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
def test_a_call_whose_message_does_not_come_is_ended(model_dir: Path, method: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"arrival_s": 0.1}) as cluster:
            method_call: Any = cluster.channel.stream_stream(f"/baton.v1.Inference/{method}", None, None)
            call = method_call()

            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "the message did not arrive within 0.1 s"

    run(scenario())


def test_a_call_may_be_quiet_for_ten_minutes_by_default() -> None:
    defaults = GatewayConfig()

    assert min(defaults.token_wait_s, defaults.request_s) > 2 * 600


def test_a_client_may_ping_a_quiet_stream(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            worker = cluster.worker("d0")
            worker.may_step.clear()
            options = [("grpc.keepalive_time_ms", 50), ("grpc.http2.max_pings_without_data", 0)]
            async with grpc.aio.insecure_channel(cluster.gateway.grpc_address, options=options) as channel:
                quiet = FakeCluster(
                    cluster.router, cluster.gateway, cluster.workers, channel, type(cluster.stub)(channel), None
                )
                task = asyncio.create_task(quiet.ask(request(max_tokens=2)))
                await until(lambda: len(worker.started) == 1, "not started")
                await asyncio.sleep(0.6)  # a dozen pings
                worker.may_step.set()
                assert len((await task).token_ids) == 2

    run(scenario())


def test_a_gateway_that_cannot_start_says_why_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            port = int(cluster.gateway.grpc_address.rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                await GatewayServer.start(
                    GatewayConfig(grpc_port=port, http_port=0), model_dir, "fake", cluster.router.address
                )

        with pytest.raises(ConfigError, match=r"config\.json is missing"):
            await GatewayServer.start(GatewayConfig(grpc_port=0, http_port=0), tmp_path, "fake", "127.0.0.1:1")
        broken = tmp_path / "broken"
        broken.mkdir()
        write_model(broken)
        (broken / "tokenizer.json").write_text(json.dumps({"model": {}}))
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            await GatewayServer.start(GatewayConfig(grpc_port=0, http_port=0), broken, "fake", "127.0.0.1:1")

    run(scenario())
