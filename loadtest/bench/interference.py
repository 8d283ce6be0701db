"""`make bench-interference`: what long prompts do to running streams, disaggregated and colocated, on this machine.

Eight streams decode. Alone, and then while prompts of 2,048 tokens are sent one after the other. The gaps between
tokens (ITL) are taken at the client. The disaggregated cluster gives prefill and decode one core each; a colocated one
has both cores for one worker, and a budget of tokens for each step: the smaller, the shorter a stream waits for a piece
of a prompt, and the longer the prompt takes.
"""

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
import numpy as np

from baton_pb.v1 import inference_pb2_grpc
from cluster.testing import RunningCluster
from loadtest.bench.asking import request_of, ttft_of
from loadtest.bench.common import BenchRow, Repeated, publish

NUM_STREAMS = 8
STREAM_PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 2048
CHUNKS = (32, 128, 512, 4096)
"""Token budgets of the colocated steps; the last one takes a whole prompt."""
POOL = "engine.pool_mib=1024"
ITL_GOAL = 1.2
"""Of p99 beside prompts over p99 alone, disaggregated."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one measured stretch of time has shown; seconds."""

    itl_p50: float
    itl_p99: float
    ttft: float | None
    """Median of the long prompts; None where none was sent."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One cluster's windows, alone and beside long prompts, in the order of the rounds."""

    alone: list[Window]
    beside: list[Window]


def main() -> None:
    """Run all modes and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measured stretches of each kind")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a stretch")
    parser.add_argument("--set", action="append", default=[], help="a setting of all clusters, a.b=c")
    arguments = parser.parse_args()
    shared = [POOL, *arguments.set]
    ours = _measure(["engine.threads=1", *shared], arguments.rounds, arguments.seconds)
    rows = [_goal_row(ours)]
    for chunk in CHUNKS:
        roles = ["prefill.workers=0", "decode.workers=0", "both.workers=1", "engine.threads=2"]
        peer = _measure([*roles, f"decode.token_budget={chunk}", *shared], arguments.rounds, arguments.seconds)
        rows += _rows(ours, peer, f"both, chunk {chunk}" if chunk <= LONG_PROMPT_TOKENS else "both, whole prompt")
    publish("interference", rows)


def _measure(settings: Sequence[str], rounds: int, seconds: float) -> Mode:
    with RunningCluster(*settings) as cluster:
        return asyncio.run(_windows(cluster.address, rounds, seconds))


async def _windows(address: str, rounds: int, seconds: float) -> Mode:
    """Measure alone and beside long prompts in turn, so that a drift of the machine meets both."""
    rng = random.Random(1)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await ttft_of(stub, rng, LONG_PROMPT_TOKENS, 4)  # connections, caches of code and pages
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(await _window(stub, rng, seconds, has_prompts=False))
            beside.append(await _window(stub, rng, seconds, has_prompts=True))
    return Mode(alone, beside)


async def _window(stub: Any, rng: random.Random, seconds: float, has_prompts: bool) -> Window:
    """Run the streams for some seconds; count only gaps after all of them have begun."""
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    begun = [asyncio.Event() for _ in times]
    streams = [asyncio.create_task(_stream(stub, rng, *each)) for each in zip(times, begun, strict=True)]
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in begun))
        start, ttfts = time.monotonic(), []
        if has_prompts:
            while time.monotonic() - start < seconds:
                ttfts.append(await ttft_of(stub, rng, LONG_PROMPT_TOKENS, 1))
        else:
            await asyncio.sleep(seconds)
        end = time.monotonic()
        failed = [stream for stream in streams if stream.done()]
        if failed:
            await failed[0]
            raise AssertionError("a stream ended before its window: it is too short for this machine")
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    gaps = [b - a for stream_times in times for a, b in pairwise(stream_times) if a >= start and b <= end]
    assert gaps, "no stream had two tokens in a window"
    p50, p99 = np.percentile(gaps, [50, 99])
    return Window(float(p50), float(p99), float(np.median(ttfts)) if ttfts else None)


async def _stream(stub: Any, rng: random.Random, times: list[float], begun: asyncio.Event) -> None:
    """Read one long stream and note when each token comes."""
    call = stub.Generate(request_of(rng, STREAM_PROMPT_TOKENS, 4096))
    try:
        async for response in call:
            times += [time.monotonic()] * len(response.token_ids)
            begun.set()
    finally:
        with contextlib.suppress(Exception):
            call.cancel()


def _goal_row(ours: Mode) -> BenchRow:
    ratio = Repeated.of([with_.itl_p99 / alone.itl_p99 for alone, with_ in zip(ours.alone, ours.beside, strict=True)])
    alone = Repeated.of([window.itl_p99 for window in ours.alone]).median
    note = f"p99 alone {alone * 1e3:.1f} ms, 1 prefill + 1 decode worker of one thread each"
    return BenchRow(
        "ITL p99 beside long prompts / alone", ratio.median, "x", False, goal=ITL_GOAL, spread=ratio.spread, note=note
    )


def _rows(ours: Mode, peer: Mode, peer_name: str) -> list[BenchRow]:
    rows = []
    for name, values in (
        ("ITL p50 beside long prompts", [[w.itl_p50 for w in mode.beside] for mode in (ours, peer)]),
        ("ITL p99 beside long prompts", [[w.itl_p99 for w in mode.beside] for mode in (ours, peer)]),
        ("ITL p99 alone", [[w.itl_p99 for w in mode.alone] for mode in (ours, peer)]),
        ("TTFT of the long prompts", [[w.ttft or 0.0 for w in mode.beside] for mode in (ours, peer)]),
    ):
        mine, theirs = (Repeated.of([value * 1e3 for value in side]) for side in values)
        rows.append(BenchRow(name, mine.median, "ms", False, theirs.median, peer_name, spread=mine.spread))
    return rows


if __name__ == "__main__":
    main()
