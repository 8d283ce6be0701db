"""kill -9 of any process: its requests end typed at once, new ones succeed, and nothing else is restarted."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from cluster.testing import RunningCluster
from common.errors import BatonError, WorkerLostError
from tests.integration.asking import Answer, Asker, greedy, request

pytestmark = pytest.mark.slow

NOTICED_WITHIN_S = 2.0
BACK_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def cluster(demo_model_dir: object) -> Iterator[RunningCluster]:
    """One prefill and one decode worker on the demo model, slow enough (fp32) to be killed in the middle."""
    with RunningCluster("engine.backend=reference", "engine.weights=fp32", "prefill.token_budget=128") as running:
        yield running


async def first_success(asker: Asker, tokens: list[int]) -> Answer:
    """Ask until an answer comes: what a client with retries sees while a worker restarts."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while True:
        try:
            return await asker.ask(request(tokens, greedy(4)), timeout_s=BACK_WITHIN_S)
        except BatonError as error:
            assert time.monotonic() < deadline, f"still failing: {error}"
            await asyncio.sleep(0.2)


async def until_prefilling(asker: Asker) -> None:
    """Wait until some worker has prompt tokens in hand."""
    async with asyncio.timeout(30):
        while not any(worker.load.queued_tokens for worker in (await asker.status()).workers):
            await asyncio.sleep(0.02)


async def ready_workers(asker: Asker) -> set[str]:
    """Return the ids of the workers that the router would choose."""
    return {worker.worker_id for worker in (await asker.status()).workers if worker.state == "ready"}


def others(pids: dict[str, int], killed: str) -> dict[str, int]:
    """Return the processes besides the killed one."""
    return {name: pid for name, pid in pids.items() if name != killed}


def test_a_prefill_worker_killed_mid_prefill_is_replaced_and_its_request_is_answered_elsewhere(
    cluster: RunningCluster, demo_text_tokens: list[int]
) -> None:
    before = cluster.pids
    prompt = demo_text_tokens[:1400]

    async def scenario() -> tuple[float, Answer, Answer, int, list[str]]:
        async with Asker(cluster.address) as asker:
            task = asyncio.create_task(asker.ask(request(prompt, greedy(8))))
            await until_prefilling(asker)
            cluster.kill("prefill-0")
            killed_at = time.monotonic()
            async with asyncio.timeout(BACK_WITHIN_S):
                while "prefill-0" in await ready_workers(asker):
                    await asyncio.sleep(0.02)
            noticed_s = time.monotonic() - killed_at
            reasons = list((await asker.status()).degraded)
            # No token had been sent, so the gateway places it again: on the decode worker alone, which is counted.
            elsewhere = await task
            fallbacks = (await asker.status()).router.counters["local_prefill_fallback"]
            async with asyncio.timeout(BACK_WITHIN_S):
                while "prefill-0" not in await ready_workers(asker):
                    await asyncio.sleep(0.05)
            remote = await asker.ask(request(prompt, greedy(8)))
            assert list((await asker.quiet_status()).degraded) == []
            return noticed_s, elsewhere, remote, fallbacks, reasons

    noticed_s, elsewhere, remote, fallbacks, reasons = asyncio.run(scenario())

    assert noticed_s < NOTICED_WITHIN_S
    assert elsewhere.token_ids == remote.token_ids
    assert elsewhere.finished is not None
    assert not elsewhere.finished.placement.HasField("prefill_worker_id")
    assert remote.finished is not None
    assert remote.finished.placement.prefill_worker_id == "prefill-0"
    assert fallbacks == 1
    [reason] = reasons
    assert reason.startswith("no prefill worker can be used")
    assert "prefill-0" in reason
    assert others(cluster.pids, "prefill-0") == others(before, "prefill-0"), "nothing else was restarted"
    assert cluster.pids["prefill-0"] != before["prefill-0"]


def test_a_decode_worker_killed_mid_stream_ends_its_streams_typed_and_comes_back(
    cluster: RunningCluster, demo_text_tokens: list[int]
) -> None:
    before = cluster.pids
    partial = Answer()

    async def scenario() -> float:
        async with Asker(cluster.address) as asker:
            task = asyncio.create_task(asker.ask(request(demo_text_tokens[100:150], greedy(2000)), into=partial))
            async with asyncio.timeout(60):
                while len(partial.token_ids) < 10:
                    await asyncio.sleep(0.02)
            cluster.kill("decode-0")
            killed_at = time.monotonic()
            with pytest.raises(WorkerLostError):
                await task
            noticed_s = time.monotonic() - killed_at
            await first_success(asker, demo_text_tokens[:40])
            await asker.quiet_status()
            return noticed_s

    noticed_s = asyncio.run(scenario())

    assert noticed_s < NOTICED_WITHIN_S
    assert others(cluster.pids, "decode-0") == others(before, "decode-0"), "nothing else was restarted"


def test_a_killed_router_disturbs_no_stream_and_knows_the_caches_again(
    cluster: RunningCluster, demo_text_tokens: list[int]
) -> None:
    before = cluster.pids
    prompt = demo_text_tokens[500:660]
    partial = Answer()

    async def scenario() -> tuple[Answer, Answer]:
        async with Asker(cluster.address) as asker:
            await asker.ask(request(prompt, greedy(2)))
            task = asyncio.create_task(asker.ask(request(demo_text_tokens[:30], greedy(100)), into=partial))
            async with asyncio.timeout(60):
                while not partial.token_ids:
                    await asyncio.sleep(0.02)
            cluster.kill("router")
            running = await task
            again = await first_success(asker, prompt)
            await asker.quiet_status()
            return running, again

    running, again = asyncio.run(scenario())

    assert len(running.token_ids) == 100
    assert again.finished is not None
    assert again.finished.usage.cached_tokens == (len(prompt) - 1) // 16 * 16, "the workers' caches are known again"
    assert others(cluster.pids, "router") == others(before, "router"), "nothing else was restarted"
