"""A client over HTTP may give its request a deadline, and meets what a gRPC client meets when it passes."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.fake_worker import FakeModel
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, run, until
from tests.cluster.gateway.http.wire import event, get, post, wire

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
STREAM = {**CHAT, "stream": True}
PATH = "/v1/chat/completions"
SHORT_S = 0.3


async def all_is_free(cluster: FakeCluster) -> None:
    await until(lambda: not any(worker.num_running for worker in cluster.workers.values()), "sequences are left")
    await until(lambda: cluster.router.status().reservations == 0, "reservations are left")
    await until(lambda: cluster.router.status().queued == 0, "still waits")


@pytest.mark.parametrize("body", [CHAT, STREAM, {**CHAT, "n": 2}], ids=["whole", "stream", "two"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("by", ["field", "header"])
def test_a_deadline_that_passes_is_504_at_any_stage_and_frees_everything(
    model_dir: Path, body: dict[str, Any], stage: str, by: str
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            stuck = cluster.worker("p0" if stage == "prefill" else "d0")
            stuck.may_step.clear()

            if by == "field":
                answer = await post(cluster, PATH, {**body, "timeout_s": SHORT_S})
            else:
                answer = await post(cluster, PATH, body, x_request_timeout=str(SHORT_S))

            assert (answer.status, answer.error["type"], answer.error["code"]) == (504, "timeout_error", None)
            assert answer.error["message"] == "the request's deadline passed, 0.300 s after it arrived"
            assert answer.headers["x-should-retry"] == "false"
            await all_is_free(cluster)
            stuck.may_step.set()

    run(scenario())


def test_a_deadline_passes_also_while_a_request_waits_for_a_worker(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, model=FakeModel(running_max=1)) as cluster:
            cluster.worker("d0").may_step.clear()
            others = [asyncio.create_task(post(cluster, PATH, CHAT)) for _ in range(2)]
            await until(lambda: cluster.router.status().reservations == 2, "not placed")

            answer = await post(cluster, PATH, {**CHAT, "timeout_s": SHORT_S})

            assert answer.status == 504
            await until(lambda: cluster.router.status().queued == 0, "still waits")
            cluster.worker("d0").may_step.set()
            assert [(await other).status for other in others] == [200] * 2

    run(scenario())


def test_a_deadline_that_passes_in_the_middle_of_a_stream_is_an_event_and_then_the_end(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"keepalive_s": 0.05}) as cluster, wire(cluster) as connection:
            cluster.worker("d0").may_step.clear()
            connection.send(PATH, {**STREAM, "timeout_s": 1.5})
            assert (await connection.head())[0] == 200  # a comment has begun the answer

            *_, error, done = await connection.rest()

            assert event(error)["error"]["type"] == "timeout_error"
            assert done == "data: [DONE]"
            await all_is_free(cluster)
            cluster.worker("d0").may_step.set()

    run(scenario())


def test_workers_are_told_the_least_of_what_is_left(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            for field, header in ((50, "70.5"), (70, "50"), (50, "nothing"), (1e9, "50")):
                headers = {} if header == "nothing" else {"x_request_timeout": header}
                assert (await post(cluster, PATH, {**CHAT, "timeout_s": field}, **headers)).status == 200
            assert (await post(cluster, PATH, {**CHAT, "timeout_s": 1e9})).status == 200

            *limited, alone = (started.timeout_s for started in cluster.worker("d0").started)
            assert all(40 < told <= 50 for told in limited)
            assert 3_500 < alone <= 3_600  # no more than the gateway grants anybody

    run(scenario())


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "nan", "inf", "1s"])
def test_a_header_that_is_no_time_is_refused_by_its_name(model_dir: Path, given: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await post(cluster, PATH, CHAT, x_request_timeout=given)

            assert (answer.status, answer.error["param"]) == (400, "x-request-timeout")
            assert (await get(cluster, "/health", x_request_timeout="5")).status == 200

    run(scenario())


def test_the_openai_client_does_not_repeat_what_its_deadline_has_ended(model_dir: Path) -> None:
    async def scenario() -> None:
        async with (
            fake_cluster(model_dir) as cluster,
            openai.AsyncOpenAI(base_url=f"http://{cluster.gateway.http_address}/v1", api_key="any") as client,
        ):
            cluster.worker("d0").may_step.clear()

            with pytest.raises(openai.InternalServerError) as raised:
                await client.chat.completions.create(
                    model="fake", messages=CHAT["messages"], extra_body={"timeout_s": SHORT_S}
                )

            assert raised.value.status_code == 504
            assert cluster.gateway._metrics.http_responses[PATH, 504] == 1
            assert client.max_retries == 2
            await all_is_free(cluster)
            cluster.worker("d0").may_step.set()

    run(scenario())
