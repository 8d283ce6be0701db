"""`make bench-router`: how fast the router's core decides, and what its index weighs. One core, no network.

Prompts of 8,192 tokens (512 blocks of 16). Half of a prompt's blocks are held by one prefill and one decode worker.
Each placement is released at once, so that the accounts stay small. Times are CPU seconds of the thread: what else runs
on the machine does not count. Run as `python -m loadtest.bench.router`.
"""

import gc
import time
import tracemalloc
from collections.abc import Sequence
from random import Random
from typing import Annotated

import numpy as np
import typer

from cluster.router.policies.registry import POLICIES
from cluster.router.prefix_index import PrefixIndex
from cluster.router.router import PlacementRequest, Router
from cluster.router.worker_table import Role, WorkerFacts, WorkerInfo, WorkerLoad
from common.chain_hash import HASH_BYTES
from loadtest.bench.common import BenchRow, Repeated, publish

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512
_GOAL_P99_MS, _GOAL_RATE, _GOAL_BYTES = 1.0, 3000.0, 120.0
_GOAL_WORKERS, _GOAL_BLOCKS = 128, 1_000_000


def main(
    blocks: Annotated[
        int, typer.Option(min=PROMPT_BLOCKS, help="Entries in the index, all workers together.")
    ] = 1_000_000,
    placements: Annotated[
        int, typer.Option(min=10, help="In each repetition, with 16 workers; fewer with more.")
    ] = 1000,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Measure placements per second, p99 decision time and index bytes."""
    rows = []
    for num_workers in (16, 128, 1000):
        # A decision looks at every worker: as many looks in each size.
        count = max(50, placements * 16 // num_workers)
        for policy in POLICIES:
            rows += _placement_rows(policy, num_workers, blocks, count, repetitions)
    rows.append(_index_row())
    publish("router", rows)


def _placement_rows(policy: str, num_workers: int, blocks: int, count: int, repetitions: int) -> list[BenchRow]:
    rng = Random(0)
    router, chains = _loaded_router(policy, num_workers, blocks, rng)
    requests = [_request(number, rng.choice(chains), rng) for number in range(count)]
    _decision_times(router, requests[: max(10, count // 10)])  # caches and branches warm
    runs = [_decision_times(router, requests) for _ in range(repetitions)]
    rate = Repeated.of([1 / float(np.mean(times)) for times in runs])
    p99 = Repeated.of([float(np.percentile(times, 99)) * 1000 for times in runs])
    has_goal = num_workers == _GOAL_WORKERS and blocks == _GOAL_BLOCKS
    label = f"{policy}, {num_workers} workers, {blocks / 1e6:g} M blocks"
    note = f"{count} placements of {PROMPT_BLOCKS} blocks, {repetitions} repetitions, CPU time"
    return [
        BenchRow(
            f"placements: {label}",
            rate.median,
            "1/s",
            True,
            goal=_GOAL_RATE if has_goal else None,
            spread=rate.spread,
            note=note,
        ),
        BenchRow(
            f"p99 decision: {label}",
            p99.median,
            "ms",
            False,
            goal=_GOAL_P99_MS if has_goal else None,
            spread=p99.spread,
            note=note,
        ),
    ]


def _loaded_router(policy: str, num_workers: int, blocks: int, rng: Random) -> tuple[Router, list[list[bytes]]]:
    """Return a router whose workers hold `blocks` entries together, and chains whose first half two of them hold."""
    router = Router(POLICIES[policy](), Random(0))
    roles = [Role.PREFILL, Role.DECODE]
    infos = [WorkerInfo(f"w{number}", "here", roles[number % 2]) for number in range(num_workers)]
    facts = WorkerFacts(1, "m", "l", BLOCK_TOKENS, b"", 1 << 20, 1 << 17)
    router.set_workers(infos)
    held: dict[str, list[bytes]] = {info.worker_id: [] for info in infos}
    chains = []
    half = PROMPT_BLOCKS // 2
    for number in range(blocks // PROMPT_BLOCKS):
        chain = [rng.randbytes(HASH_BYTES) for _ in range(PROMPT_BLOCKS)]
        pair = 2 * (number % (num_workers // 2))
        for worker in (pair, pair + 1):
            held[f"w{worker}"] += chain[:half]
        chains.append(chain)
    for info in infos:
        router.welcome(info.worker_id, facts)
        router.index.replace(info.worker_id, held[info.worker_id])
        router.report(info.worker_id, WorkerLoad(rng.randrange(5000), 0, rng.randrange(30)))
    return router, chains


def _request(number: int, chain: Sequence[bytes], rng: Random) -> PlacementRequest:
    return PlacementRequest(f"r{number}", PROMPT_BLOCKS * BLOCK_TOKENS, rng.randrange(1, 500), chain)


def _decision_times(router: Router, requests: Sequence[PlacementRequest]) -> list[float]:
    times = []
    for request in requests:
        begin = time.thread_time()
        reservation = router.place(request)
        times.append(time.thread_time() - begin)
        reservation.release()
    return times


def _index_row() -> BenchRow:
    """Measure with tracemalloc what 200,000 entries of 8 workers weigh, the hashes' own bytes included."""
    rng, count, num_workers = Random(0), 200_000, 8
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex()
    for worker in range(num_workers):
        index.replace(f"w{worker}", (rng.randbytes(HASH_BYTES) for _ in range(count // num_workers)))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return BenchRow(
        "index bytes for each block of a worker",
        used / index.num_blocks,
        "bytes",
        False,
        goal=_GOAL_BYTES,
        note=f"{count} entries, {num_workers} workers",
    )


if __name__ == "__main__":
    typer.run(main)
