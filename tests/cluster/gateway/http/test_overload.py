"""Overload sheds what there is no room for, and nothing of it stays: who comes after it is served."""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

from cluster.fake_worker import FakeModel
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, run, until
from tests.cluster.gateway.http.wire import post, request_bytes

BODY = {"prompt": "hello", "max_tokens": 2}
CONNECTIONS, QUEUED, RUNNING = 2000, 200, 8
STORM_LIMIT_S = 240.0
"""Five seconds of work, on a machine that others use too."""


def test_two_thousand_connections_at_once_are_answered_or_told_when_to_come_back_and_the_next_is_served(
    model_dir: Path,
) -> None:
    async def ask(cluster: FakeCluster, answers: list[bytes]) -> None:
        host, _, port = cluster.gateway.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_bytes("/v1/completions", BODY, connection="close"))
        answers.append(await reader.read())
        writer.transport.abort()

    async def scenario() -> None:
        model = FakeModel(running_max=RUNNING)
        settings: dict[str, Any] = {
            "queue_max": QUEUED,
            "router_wait_s": STORM_LIMIT_S,
        }  # the router has but a share of this one process
        async with fake_cluster(model_dir, num_prefill=0, model=model, **settings) as cluster:
            worker, answers = cluster.worker("d0"), list[bytes]()
            worker.may_step.clear()

            def waiting() -> int:
                status = cluster.router.status()
                return status.queued + status.reservations

            async with asyncio.TaskGroup() as clients:
                for _ in range(CONNECTIONS):
                    clients.create_task(ask(cluster, answers))
                await until(lambda: len(answers) + waiting() == CONNECTIONS, "some wait unseen", STORM_LIMIT_S)
                refused, kept = list(answers), waiting()
                worker.may_step.set()
            after = await post(cluster, "/v1/completions", BODY)

            assert QUEUED + RUNNING <= kept < QUEUED + 2 * RUNNING
            assert Counter(answer.split()[1] for answer in answers) == {b"429": CONNECTIONS - kept, b"200": kept}
            assert all(re.search(rb"\r\nretry-after: [1-9]", answer.lower()) for answer in refused)
            assert after.status == 200

    run(scenario(), STORM_LIMIT_S)
