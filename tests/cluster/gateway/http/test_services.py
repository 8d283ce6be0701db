"""The small endpoints: tokenize, detokenize, models, health, readiness, metrics, the API's description."""

import asyncio
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest

from cluster.gateway.http.openapi import document
from cluster.gateway.server import GatewayServer
from common.config import RouterConfig
from common.config_doors import GatewayConfig
from common.errors import ConfigError
from common.text import Text
from tests.cluster.fake_cluster import HOST, LIMIT_S, fake_cluster, run, until
from tests.cluster.gateway.http.wire import get, post, wire


def test_tokenize_and_detokenize_are_inverse(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            told = await post(cluster, "/tokenize", {"prompt": "Grüße <|im_end|>", "return_token_strs": True})
            back = await post(cluster, "/detokenize", {"tokens": told.json["tokens"]})

            assert told.json["tokens"] == Text.load(model_dir).encode("Grüße <|im_end|>")
            assert told.json["count"] == len(told.json["tokens"]) == len(told.json["token_strs"])
            assert told.json["max_model_len"] == 512
            assert back.json == {"prompt": "Grüße <|im_end|>"}

    run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "gpt"}, 404, "model"),
        ("/detokenize", {"tokens": [320]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
    ids=["nothing", "both", "model", "vocabulary", "type"],
)
def test_wrong_texts_and_ids_are_refused(
    model_dir: Path, path: str, body: dict[str, object], status: int, param: str
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await post(cluster, path, body)

            assert answer.status == status
            if param != "prompt":
                assert answer.error["param"] == param

    run(scenario())


def test_ready_means_that_a_request_could_be_placed(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            assert (await get(cluster, "/ready")).status == 200

            await cluster.worker("d0").kill()
            await until(lambda: cluster.states()["d0"] != "ready", "not lost")
            without_worker = await get(cluster, "/ready")
            address = cluster.router.address
            await cluster.router.stop()
            without_router = await get(cluster, "/ready")

            assert (without_worker.status, without_router.status) == (503, 503)
            assert "d0 lost" in without_worker.error["message"]
            assert (await get(cluster, "/health")).status == 200
            assert (await get(cluster, "/version")).json == {"version": metadata.version("baton-serve")}
            await cluster.restart_worker("d0")
            cluster.router = await type(cluster.router).start(HOST, _port(address), RouterConfig(), 0.2)
            await cluster.set_workers()
            async with asyncio.timeout(LIMIT_S):
                while (await get(cluster, "/ready")).status != 200:  # noqa: ASYNC110  # as whoever probes it does
                    await asyncio.sleep(0.05)
            assert (await post(cluster, "/v1/completions", {"prompt": "x", "max_tokens": 1})).status == 200

    run(scenario())


def test_metrics_count_requests_tokens_times_and_errors(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            await post(cluster, "/v1/completions", {"prompt": "hello", "max_tokens": 5, "n": 2})
            await post(cluster, "/v1/completions", {"prompt": "hello", "max_tokens": 5000})
            await post(cluster, "/v1/completions", {"prompt": "hello", "max_tokens": "x"})
            answer = await get(cluster, "/metrics")

            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = answer.body.decode().splitlines()
            for line in (
                "baton_gateway_requests_total 3",
                "baton_gateway_running_requests 0",
                'baton_gateway_errors_total{code="INVALID_ARGUMENT"} 1',
                "baton_gateway_output_tokens_total 10",
                "baton_gateway_cached_tokens_total 4",
                "baton_gateway_ttft_seconds_count 2",
                "baton_gateway_itl_seconds_count 8",
                'baton_gateway_itl_seconds_bucket{le="+Inf"} 8',
                'baton_gateway_http_responses_total{path="/v1/completions",code="200"} 1',
                'baton_gateway_http_responses_total{path="/v1/completions",code="400"} 2',
            ):
                assert line in lines

    run(scenario())


def test_tools_for_vllms_server_find_its_metrics_and_small_paths(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            cluster.worker("d0").load.blocks_free = 6
            cluster.worker("d0").load.blocks_used = 2
            cluster.worker("d0").report()
            await post(cluster, "/v1/completions", {"prompt": "hello", "max_tokens": 5, "n": 2})
            await until(lambda: cluster.router.status().workers[1].load.blocks_used == 2, "not reported")
            lines = (await get(cluster, "/metrics")).body.decode().splitlines()

            [prompt_tokens] = [
                line.split()[1] for line in lines if line.startswith("baton_gateway_prompt_tokens_total ")
            ]
            for line in (
                f'vllm:prompt_tokens_total{{model_name="fake"}} {prompt_tokens}',
                "# TYPE vllm:num_requests_running gauge",
                'vllm:num_requests_running{model_name="fake"} 0',
                'vllm:num_requests_waiting{model_name="fake"} 0',
                'vllm:kv_cache_usage_perc{model_name="fake"} 0.25',
                'vllm:gpu_cache_usage_perc{model_name="fake"} 0.25',
                "# TYPE vllm:time_to_first_token_seconds histogram",
                'vllm:time_to_first_token_seconds_bucket{model_name="fake",le="+Inf"} 2',
                'vllm:inter_token_latency_seconds_count{model_name="fake"} 8',
                'vllm:time_per_output_token_seconds_count{model_name="fake"} 8',
                'vllm:e2e_request_latency_seconds_count{model_name="fake"} 2',
                "# TYPE vllm:generation_tokens_total counter",
                'vllm:generation_tokens_total{model_name="fake"} 10',
                'vllm:prefix_cache_hits_total{model_name="fake"} 4',
                'vllm:request_success_total{model_name="fake",finished_reason="length"} 2',
                'vllm:request_success_total{model_name="fake",finished_reason="stop"} 0',
            ):
                assert line in lines, line
            assert (await get(cluster, "/ping")).status == 200
            assert (await get(cluster, "/is_sleeping")).json == {"is_sleeping": False}
            assert (await get(cluster, "/load")).json == {"server_load": 0}

    run(scenario())


def test_the_description_is_whole_and_the_page_needs_nothing_else(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            told = (await get(cluster, "/openapi.json")).json
            page = await get(cluster, "/docs")

            assert told == document()
            assert b"http" not in page.body.replace(b"HTTP", b"")
            for path, calls in told["paths"].items():
                method = next(iter(calls)).upper()
                answer = await get(cluster, path.format(model="fake"), "GET" if method == "POST" else "POST")
                assert answer.status == 405, path
            good = {"messages": [{"role": "user", "content": "x"}], "priority": None, "stop": ["a"]}
            schema = {"$ref": "#/components/schemas/ChatRequest", "components": told["components"]}
            jsonschema.validate(good, schema)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**good, "tools": [{}]}, schema)

    run(scenario())


def test_head_has_no_body(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            connection.send("/health", method="HEAD", connection="close")
            assert (await connection.head())[0] == 200
            async with asyncio.timeout(LIMIT_S):
                assert await connection.reader.read() == b""

    run(scenario())


def test_a_busy_http_port_is_said_in_one_line_and_leaves_nothing(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            port = _port(cluster.gateway.http_address)
            config = GatewayConfig(host=HOST, grpc_port=0, http_port=port)

            with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{port}: is the port taken"):
                await GatewayServer.start(config, model_dir, "fake", cluster.router.address)

    run(scenario())


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
