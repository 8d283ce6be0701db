"""After any storm of requests and cancels, over real processes with small pools, everything is at its baseline."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from cluster.testing import RunningCluster
from common.errors import BatonError, InvalidRequestError, OverloadedError
from engine.tiny import make_tiny_model
from tests.integration.asking import Asker, Oracle, greedy, request

pytestmark = pytest.mark.slow

NUM_REQUESTS = 200
POOL_BLOCKS = 48
BLOCK = 8


def test_two_hundred_requests_cancelled_at_every_stage_leave_nothing_behind(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny")
    oracle = Oracle(model_dir)
    rng = random.Random(11)
    shared = [rng.randrange(4, oracle.vocab_tokens) for _ in range(200)]
    outcomes: Counter[str] = Counter()

    async def over_http(client: httpx.AsyncClient, prompt: list[int], num_tokens: int, cut_after: int | None) -> None:
        """Ask for a stream, and cut the connection after so many events, or read it to the end."""
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                outcomes["refused over HTTP"] += 1
                return
            assert answer.status_code == 200
            events = list[str]()
            async for line in answer.aiter_lines():
                events += [line.removeprefix("data: ")] if line.startswith("data: ") else []
                if cut_after is not None and len(events) >= cut_after:
                    outcomes["cut over HTTP"] += 1
                    return
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == num_tokens
        outcomes["answered over HTTP"] += 1

    async def one(asker: Asker, client: httpx.AsyncClient, number: int) -> None:
        random_here = random.Random(number)
        prompt = shared[: random_here.randrange(0, 120)] + [
            random_here.randrange(4, oracle.vocab_tokens) for _ in range(random_here.randrange(1, 100))
        ]
        num_tokens = random_here.randrange(1, 60)
        message = request(prompt, greedy(num_tokens))
        await asyncio.sleep(random_here.random() * 10)
        match random_here.randrange(6):
            case 0:  # some time after it was sent: queued, prefilling, transferring or decoding
                task = asyncio.create_task(asker.ask(message))
                await asyncio.wait([task], timeout=random_here.random() * 0.5)
                outcomes["cancelled by time" if task.cancel() else "too late to cancel"] += 1
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()
            case 1:  # while decoding
                await asker.ask(message, cancel_after_messages=random_here.randrange(1, 10))
                outcomes["cancelled by count"] += 1
            case 2:  # a deadline that may be too short
                try:
                    answer = await asker.ask(message, timeout_s=0.05 + random_here.random())
                    outcomes["in time"] += 1
                    assert len(answer.token_ids) == num_tokens
                except BatonError:
                    outcomes["late"] += 1
            case 3:
                await over_http(client, prompt, num_tokens, cut_after=random_here.randrange(1, 10))
            case 4:
                await over_http(client, prompt, num_tokens, cut_after=None)
            case _:
                try:
                    answer = await asker.ask(message)
                except OverloadedError:
                    outcomes["refused"] += 1
                    return
                outcomes["answered"] += 1
                assert answer.token_ids == oracle.generate(prompt, num_tokens)

    async def storm(address: str, http_address: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            Asker(address) as asker,
            httpx.AsyncClient(base_url=f"http://{http_address}", timeout=300, limits=limits) as client,
        ):
            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_REQUESTS):
                    tasks.create_task(one(asker, client, number))
            status = await asker.quiet_status()
            for worker in status.workers:
                assert worker.load.blocks_free + worker.load.blocks_kept == POOL_BLOCKS
            with pytest.raises(InvalidRequestError, match=f"400 tokens.*{POOL_BLOCKS * BLOCK}"):
                await asker.ask(request(shared * 2, greedy(60)))
            after = await asker.ask(request(shared[:50], greedy(5)))
            assert after.token_ids == oracle.generate(shared[:50], 5)

    with RunningCluster(
        f"model.source={model_dir}",
        "engine.backend=reference",
        "engine.weights=fp32",
        f"engine.block_tokens={BLOCK}",
        f"engine.pool_blocks={POOL_BLOCKS}",
        "prefill.workers=2",
        "decode.workers=2",
        "prefill.token_budget=40",
    ) as cluster:
        asyncio.run(storm(cluster.address, cluster.addresses["http"]))

    for outcome in ("answered", "cancelled by count", "answered over HTTP", "cut over HTTP"):
        assert outcomes[outcome] > 15, outcomes
