"""How much load one client process can make: measured against an echo in a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.errors import WorkerLostError
from loadtest.arrivals import ClosedArrival
from loadtest.client import BatonTarget
from loadtest.metrics import summarize
from loadtest.openai import OpenAITarget
from loadtest.records import Slo
from loadtest.runner import LoadRun, RunOptions
from loadtest.workload import SyntheticWorkload, take

_START_TIMEOUT_S = 30.0
_CONTEXT_TOKENS, _VOCAB_TOKENS = 8192, 32_000
"""Of the HTTP echo, whose API does not tell them."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the client reached, with the echo on another core."""

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    tokens_per_s: float
    errors: int


async def measure_capacity(
    duration_s: float, prompt_tokens: int, output_tokens: int, is_http: bool = False, users: int = 64
) -> Capacity:
    """Send as fast as the client can for a while.

    Args:
        duration_s: how long.
        prompt_tokens: length of each prompt.
        output_tokens: messages in each answer.
        is_http: ask over OpenAI's API instead of gRPC.
        users: requests at once.

    Raises:
        WorkerLostError: the echo did not start.
    """
    async with _echo_process("loadtest.echo_http" if is_http else "loadtest.echo") as address:
        target = (
            OpenAITarget(f"http://{address}", None, _CONTEXT_TOKENS, _VOCAB_TOKENS) if is_http else BatonTarget(address)
        )
        try:
            model = await target.model()
            run = LoadRun(target, RunOptions(duration_s=duration_s))
            workload = SyntheticWorkload(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
            await run.run(take(workload, 0, model.context_tokens, None), ClosedArrival(users=users))
        finally:
            await target.close()
    summary = summarize(run.records, Slo(1.0, 1.0))
    return Capacity(
        prompt_tokens,
        output_tokens,
        summary.requests_per_s,
        summary.output_tokens_per_s,
        sum(summary.errors.values()),
    )


@asynccontextmanager
async def _echo_process(module: str) -> AsyncIterator[str]:
    """Run an echo in another process; yields its address."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
        if not line:
            raise WorkerLostError("the echo process ended before it listened")
        yield line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
