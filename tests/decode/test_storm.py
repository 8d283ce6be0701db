"""After a storm of requests, cancels, errors and lost sessions: right tokens, every block back, every counter zero."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton_pb.v1 import worker_pb2
from common.config import EngineConfig
from common.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    TransferError,
    WorkerLostError,
)
from decode.worker import DecodeWorker
from engine.fake import fake_continuation
from prefill.worker import PrefillWorker
from tests.decode.serving import Gateway, serving

NUM_REQUESTS = 60
BASES = [[(start + 3 * i) % 1000 for i in range(48)] for start in range(3)]


class Client:
    """One client that asks, waits, and sometimes leaves."""

    def __init__(self, seed: int, gateway: Gateway, decode: DecodeWorker, prefill: list[PrefillWorker]) -> None:
        self.random = random.Random(seed)
        self.gateway = gateway
        self.decode = decode
        self.prefill = prefill

    async def ask(self, request_id: str) -> None:
        draw = self.random
        base = draw.choice(BASES)
        token_ids = base[: draw.randrange(1, 48)] + [draw.randrange(1000) for _ in range(draw.randrange(4))]
        max_tokens = draw.randrange(1, 24)
        target = draw.choice([None, *self.prefill, *self.prefill])
        timeout_s = draw.choice([0.0, 0.0, 0.0, 0.05])
        answer_at = draw.choice([None, None, 0, 1, 5])
        await asyncio.sleep(draw.random() * 0.1)  # arrivals spread; nothing is waited for
        await self.gateway.start(
            request_id, token_ids, target, timeout_s=timeout_s, holder=self._holder(), max_tokens=max_tokens
        )
        answer = self.gateway.answers[request_id]
        if answer_at is None:
            await self.gateway.over(request_id)
        else:
            await self.gateway.until(lambda: answer.is_over or len(answer.tokens) >= answer_at)
            if not answer.is_over:
                await self.gateway.cancel(request_id)
        want = fake_continuation(token_ids, max_tokens)
        assert answer.tokens == want[: len(answer.tokens)]
        if answer.error is not None:
            allowed = (DeadlineError, InvalidRequestError, NotFoundError, OverloadedError, TransferError)
            assert isinstance(answer.error, allowed) or type(answer.error) in (BatonError, WorkerLostError)
        elif answer.finished is not None:
            assert answer.tokens == want

    def _holder(self) -> worker_pb2.PrefixHolder | None:
        """Name any worker, or none: the router's knowledge may be old."""
        worker = self.random.choice([None, self.decode, *self.prefill])
        if worker is None:
            return None
        num_blocks = self.random.randrange(1, 12)
        return worker_pb2.PrefixHolder(worker_id=worker.worker_id, address=worker.address, num_blocks=num_blocks)


@pytest.mark.parametrize(("seed", "has_tiers"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_storm_leaves_nothing_behind(seed: int, has_tiers: bool, tmp_path: Path) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        async with serving() as bench, AsyncExitStack() as stack:
            if has_tiers:
                sizes = {"host_tier_mib": 1, "disk_tier_mib": 1, "tier_codec": "raw"}
                bench.tiers = EngineConfig.model_validate({**sizes, "disk_tier_dir": tmp_path})
            prefill = [
                await bench.prefill(f"prefill-{n}", num_blocks=24, token_budget=13, waiting_max=12) for n in range(2)
            ]
            decode = [await bench.decode(f"decode-{n}", num_blocks=30, running_max=6, step_s=0.001) for n in range(2)]
            clients = []
            for number in range(4):
                worker = decode[number % 2]
                gateway = await stack.enter_async_context(Gateway(worker.address, f"gateway-{number}"))
                clients.append(Client(seed * 10 + number, gateway, worker, prefill))

            async def disturb() -> None:
                for _ in range(4):
                    await asyncio.sleep(draw.random() * 0.02)
                    bench.network.hold()
                    bench.network.piece_errors.append(TransferError("a wrong checksum"))
                    bench.network.open_errors.append(WorkerLostError("no route"))
                    await asyncio.sleep(draw.random() * 0.01)
                    bench.network.flow()

            async with asyncio.TaskGroup() as group:
                group.create_task(disturb())
                for number in range(NUM_REQUESTS):
                    group.create_task(clients[number % 4].ask(f"r{number}"))
                async with Gateway(decode[0].address, "leaves") as leaves:
                    for number in range(8):
                        await leaves.start(f"r{number}", BASES[0], prefill[0])
                    await asyncio.sleep(0.02)

            await bench.at_rest()
            bench.network.piece_errors.clear()
            bench.network.open_errors.clear()
            for pool in (worker.engine.pool for worker in prefill):  # what they kept is below, if anything is
                pool.release(pool.allocate(pool.num_blocks))
            for number, client in enumerate(clients):
                holder = worker_pb2.PrefixHolder(worker_id="prefill-0", address=prefill[0].address, num_blocks=9)
                target = prefill[number // 2]
                calm = await client.gateway.ask(f"calm {number}", BASES[0], target, holder=holder, max_tokens=9)
                assert calm.tokens == fake_continuation(BASES[0], 9)
            ends = Counter(
                "right" if answer.finished else type(answer.error).__name__
                for client in clients
                for answer in client.gateway.answers.values()
            )
            assert ends["right"] > len(clients), ends
            counters = sum((Counter(worker.loop.load().counters) for worker in bench.workers), Counter())
            assert counters["tier_blocks_restored_total" if has_tiers else "prefix_fetches_total"], counters

    asyncio.run(main())
