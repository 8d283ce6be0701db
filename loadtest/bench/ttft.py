"""`make bench-ttft`: what disaggregation costs a prompt that comes alone, shared memory, this machine.

A cluster of a prefill and a decode worker and one worker of role `both` run side by side, a compute thread and steps
of the same size each; each prompt goes to one and then to the other, and whoever is not asked is idle. The time to the
second token holds the transfer, the time to the first does not.
"""

import argparse
import asyncio
import random

import grpc

from baton_pb.v1 import inference_pb2_grpc
from cluster.testing import RunningCluster
from loadtest.bench.asking import ttft_of
from loadtest.bench.common import BenchRow, Repeated, publish

PROMPT_TOKENS = (128, 512, 1024, 2048)
SHARED = ["engine.threads=1", "engine.pool_mib=512", "prefill.token_budget=512", "decode.token_budget=512"]
COLOCATED = ["prefill.workers=0", "decode.workers=0", "both.workers=1"]
GOAL = 1.05
"""Of our TTFT over the colocated one's."""


def main() -> None:
    """Measure and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="prompts of each length to each cluster")
    parser.add_argument("--set", action="append", default=[], help="a setting of both clusters, a.b=c")
    arguments = parser.parse_args()
    shared = [*SHARED, *arguments.set]
    with RunningCluster(*shared) as apart, RunningCluster(*COLOCATED, *shared) as together:
        rows = asyncio.run(_rows(apart.address, together.address, arguments.rounds))
    publish("ttft", rows)


async def _rows(apart: str, together: str, rounds: int) -> list[BenchRow]:
    rng = random.Random(2)
    async with grpc.aio.insecure_channel(apart) as ours, grpc.aio.insecure_channel(together) as peers:
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in (ours, peers)]
        for stub in stubs:
            await ttft_of(stub, rng, max(PROMPT_TOKENS), 4)  # connections, caches of code and pages
        rows = []
        for prompt_tokens in PROMPT_TOKENS:
            mine, theirs = [], []
            for _ in range(rounds):
                mine.append(await ttft_of(stubs[0], rng, prompt_tokens, 2))
                theirs.append(await ttft_of(stubs[1], rng, prompt_tokens, 2))
            rows.append(_row(prompt_tokens, mine, theirs))
    return rows


def _row(prompt_tokens: int, mine: list[float], theirs: list[float]) -> BenchRow:
    ratio = Repeated.of([a / b for a, b in zip(mine, theirs, strict=True)])
    own, peer = (Repeated.of([value * 1e3 for value in side]).median for side in (mine, theirs))
    note = f"{own:.0f} ms apart, {peer:.0f} ms together"
    name = f"TTFT of {prompt_tokens} tokens, apart / together"
    return BenchRow(name, ratio.median, "x", False, goal=GOAL, spread=ratio.spread, note=note)


if __name__ == "__main__":
    main()
