"""Tokens reach a client one by one as the worker makes them, over connections that are kept."""

import asyncio
import time
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


def test_the_time_to_the_first_token_is_the_clients_and_its_parts_add_up(model_dir: Path) -> None:
    body: dict[str, Any] = {"prompt": [70, 71, 72], "max_tokens": 2, "stream": True, "timing": True}

    async def attempt() -> float:
        """Return the share of the client's time that is not told; a machine that is busy elsewhere adds to it."""
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            prefill = cluster.worker("p0")
            prefill.may_step.clear()
            sent_at = time.monotonic()
            connection.send("/v1/completions", body)
            await until(lambda: len(prefill.prefilled) == 1, "not prefilling")
            await asyncio.sleep(0.5)  # what is measured
            prefill.may_step.set()
            await connection.head()
            await connection.chunk()
            seen_s = time.monotonic() - sent_at
            timing = next(told for line in await connection.rest() if (told := line_timing(line)))
        assert timing["ttft_s"] >= 0.5
        assert abs(timing["ttft_s"] - timing["queue_s"] - timing["prefill_s"]) < 0.01 * timing["ttft_s"]
        assert timing["ttft_s"] <= seen_s
        return 1 - float(timing["ttft_s"]) / seen_s

    async def scenario() -> None:
        assert min([await attempt() for _ in range(3)]) < 0.05

    run(scenario())


def line_timing(line: str) -> dict[str, Any] | None:
    """Return what an event tells of the time."""
    return None if line.endswith("[DONE]") else event(line).get("timing")
