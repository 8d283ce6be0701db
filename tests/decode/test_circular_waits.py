"""Small windows, small pools and fetches that cross wait for each other in no circle: all that is asked for ends."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from baton_pb.v1 import worker_pb2
from common.config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig
from decode.worker import DecodeWorker
from engine.tiny import make_tiny_model
from prefill.worker import PrefillWorker
from tests.decode.serving import Gateway
from tests.integration.asking import Oracle

NUM_REQUESTS = 32
NUM_OUTPUT = 4
POOL_BLOCKS = 16
"""Of each worker: room for two requests, not for three."""
BLOCK_BYTES = 6144
"""Of the tiny model, with 8 tokens in fp32."""
WINDOW_BLOCKS = 2
ENGINE = EngineConfig(
    backend="reference", weights="fp32", kv_dtype="float32", block_tokens=8, pool_blocks=POOL_BLOCKS, threads=1
)


async def start_prefill(stack: AsyncExitStack, model_dir: Path, name: str, transfer: TransferConfig) -> PrefillWorker:
    config = PrefillConfig(token_budget=16)
    worker = await PrefillWorker.start(name, "127.0.0.1", model_dir, "tiny", ENGINE, config, transfer, 0.5)
    stack.push_async_callback(worker.stop, 0.0)
    return worker


async def start_decode(stack: AsyncExitStack, model_dir: Path, name: str, transfer: TransferConfig) -> DecodeWorker:
    config = DecodeConfig(token_budget=16)
    worker = await DecodeWorker.start(name, "127.0.0.1", model_dir, "tiny", ENGINE, config, transfer, 0.5)
    stack.push_async_callback(worker.stop, 0.0)
    return worker


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "ucx", "shm"])
def test_everything_ends_with_windows_of_two_blocks_tiny_pools_and_fetches_that_cross(
    tmp_path: Path, transport: str
) -> None:
    model_dir = make_tiny_model(tmp_path)
    oracle, draw = Oracle(model_dir), random.Random(7)
    prefixes = [[draw.randrange(4, 254) for _ in range(32)] for _ in range(3)]
    prompts = [[*draw.choice(prefixes), *(draw.randrange(4, 254) for _ in range(13))] for _ in range(NUM_REQUESTS)]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            transfer = TransferConfig.model_validate(
                {"transport": transport, "inflight_bytes_max": WINDOW_BLOCKS * BLOCK_BYTES, "lease_s": 30.0}
            )
            prefills = [await start_prefill(stack, model_dir, f"prefill-{i}", transfer) for i in range(2)]
            decodes = [await start_decode(stack, model_dir, f"decode-{i}", transfer) for i in range(2)]
            gateways = [await stack.enter_async_context(Gateway(decode.address)) for decode in decodes]

            asked: list[list[str]] = [[], []]
            for i, prompt in enumerate(prompts):
                prefill = prefills[i % 2]
                holder = prefills[(i + 1) % 2] if i % 3 else decodes[(i + 1) % 2]
                where = worker_pb2.PrefixHolder(worker_id=holder.worker_id, address=holder.address, num_blocks=4)
                options: dict[str, Any] = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "holder": where}
                asked[i // 2 % 2].append(f"r{i}")
                await gateways[i // 2 % 2].start(f"r{i}", prompt, prefill, **options)

            for gateway, request_ids in zip(gateways, asked, strict=True):
                for request_id, answer in zip(request_ids, await gateway.over(*request_ids, limit_s=120), strict=True):
                    assert answer.error is None, answer.error
                    assert answer.tokens == oracle.generate(prompts[int(request_id[1:])], NUM_OUTPUT)
            for worker in (*prefills, *decodes):
                worker.engine.pool.check()

    asyncio.run(main())
