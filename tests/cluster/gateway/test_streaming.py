"""Tokens reach a client one by one as the worker makes them, over connections that are kept."""

from pathlib import Path
from typing import Any

from tests.cluster.fake_cluster import fake_cluster, request, run, until
from tests.cluster.gateway.http.wire import event, wire

STEPS = 5


def test_a_client_has_each_token_before_the_next_one_is_made(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 3600.0
            call = cluster.call(request([5, 6, 7], max_tokens=STEPS + 2), timeout_s=None)
            for number in range(STEPS):
                part = await call.read()
                assert len(part.token_ids) == 1
                assert worker.num_tokens == number + 1
                worker.step()
            call.cancel()

    run(scenario())


def test_an_http_client_has_each_event_before_the_next_token_is_made(model_dir: Path) -> None:
    body: dict[str, Any] = {"prompt": [70, 71, 72], "max_tokens": STEPS + 2, "stream": True}

    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster, wire(cluster) as connection:
            worker = cluster.worker("d0")
            worker.step_s = 3600.0
            connection.send("/v1/completions", body)
            await connection.head()
            for number in range(STEPS):
                part = event((await connection.chunk()).decode().removesuffix("\n\n"))
                assert len(part["choices"][0]["text"]) == 1
                assert worker.num_tokens == number + 1
                worker.step()
            connection.cut()
            await until(lambda: worker.num_running == 0, "not cancelled")

    run(scenario())


def test_requests_share_the_gateways_session_with_a_worker_and_a_clients_connection(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            for _ in range(5):
                await cluster.ask(request(max_tokens=2))
                connection.send("/v1/completions", {"prompt": "hello", "max_tokens": 2})
                answer = await connection.response()
                assert answer.status == 200
                assert answer.headers["content-type"] == "application/json"

            assert cluster.worker("d0").num_sessions == 1
            assert len(cluster.worker("d0").started) == 10

    run(scenario())
