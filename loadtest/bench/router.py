"""`make bench-router`: how fast the router's core decides, and what its index weighs. One core, no network.

Prompts of 8,192 tokens (512 blocks of 16), of two kinds. Hit-heavy: all prompts begin with the same 64 blocks, which
every worker holds; 320 further blocks are held by one prefill and one decode worker. Disjoint: nobody holds a block of
any prompt. Between two placements a worker reports, and 32 earlier requests are still running. Times are CPU seconds of
the thread: what else runs on the machine does not count. What the index does alone is measured beside Dynamo's, if
`loadtest/bench/peers/radix.sh` could install that. How whole routers compare, `make bench-gateway` measures; what the
policies make of a trace is simulated at the end (loadtest/bench/policies.py).
Run as `python -m loadtest.bench.router`.
"""

import gc
import json
import statistics
import subprocess
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.registry import POLICIES
from cluster.router.prefix_index import PrefixIndex
from cluster.router.router import Router
from cluster.router.worker import Role, WorkerFacts, WorkerInfo, WorkerLoad
from common.chain_hash import HASH_BYTES
from loadtest.bench.common import BenchRow, Repeated, publish
from loadtest.bench.policies import compare

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512
_COMMON_BLOCKS, _OWN_BLOCKS = 64, 320
_RUNNING = 32
_GOAL_P99_MS, _GOAL_RATE, _GOAL_BYTES = 1.0, 3000.0, 120.0
_GOAL_WORKERS = 128
_PEER = Path.home() / ".cache/baton/peers/dynamo"
_PEER_NAME = "ai-dynamo-runtime RadixTree"
_PEER_SCRIPT = Path(__file__).parent / "radix_peer.py"
_PEER_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class _Size:
    workers: int
    blocks: int
    """Entries of the index, all workers together."""

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.blocks / 1e6:g} M blocks"


_SIZES = [_Size(16, 1_000_000), _Size(128, 1_000_000), _Size(1000, 1_000_000), _Size(1000, 10_000_000)]


def main(
    placements: Annotated[int, typer.Option(min=100, help="In each repetition.")] = 3000,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    quick: Annotated[bool, typer.Option(help="Without the index of 10 million blocks.")] = False,
    only: Annotated[str | None, typer.Option(help="One policy instead of all.")] = None,
    peer: Annotated[Path, typer.Option(help="Venv that loadtest/bench/peers/radix.sh has made.")] = _PEER,
    policies: Annotated[bool, typer.Option(help="Simulate all policies afterwards, some five minutes.")] = True,
    trace: Annotated[Path | None, typer.Option(help="For that: Mooncake JSONL instead of conversations.")] = None,
) -> None:
    """Measure placements per second, p99 decision time and index bytes, and the index beside Dynamo's."""
    rows = []
    for size in _SIZES[:-1] if quick else _SIZES:
        cluster = _Cluster(size)
        for policy in POLICIES if only is None else [only]:
            for kind, chain in (("hit-heavy", cluster.held_chain), ("disjoint", cluster.unknown_chain)):
                requests = [_request(number, chain(), cluster.rng) for number in range(placements)]
                router = cluster.router(policy)
                _run(router, requests[: placements // 10])  # caches and branches warm
                runs = [_run(router, requests) for _ in range(repetitions)]
                rows += _rows(f"{policy}, {kind}, {size}", size.workers == _GOAL_WORKERS, runs)
        rows.append(_events_row(cluster))
        rows += _match_rows(cluster, _radix(peer, size, placements))
    rows += [_bytes_row(workers, holders) for workers in (8, 1000) for holders in (1, 2)]
    publish("router", rows)
    if policies:
        compare(trace)


class _Cluster:
    """Workers of one size and what they hold."""

    def __init__(self, size: _Size) -> None:
        self.size = size
        self.rng = rng = Random(0)
        self._infos = [
            WorkerInfo(f"w{number}", "here", (Role.PREFILL, Role.DECODE)[number % 2]) for number in range(size.workers)
        ]
        self._common = [rng.randbytes(HASH_BYTES) for _ in range(_COMMON_BLOCKS)]
        self._chains: deque[list[bytes]] = deque(maxlen=2000)
        self._numbers: Counter[str] = Counter()
        self.index = PrefixIndex()
        for info in self._infos:
            self.index.replace(info.worker_id, self._common)
        for _ in range((size.blocks - self.index.num_blocks) // (2 * _OWN_BLOCKS)):
            own = [rng.randbytes(HASH_BYTES) for _ in range(_OWN_BLOCKS)]
            pair = 2 * rng.randrange(size.workers // 2)
            self.store(f"w{pair}", own)
            self.store(f"w{pair + 1}", own)
            self._chains.append([*self._common, *own])

    def store(self, worker_id: str, hashes: Sequence[bytes]) -> None:
        """Let a worker announce blocks."""
        self._numbers[worker_id] += 1
        assert self.index.apply(worker_id, self._numbers[worker_id], True, hashes)

    def evict(self, worker_id: str, hashes: Sequence[bytes]) -> None:
        """Let a worker take them back."""
        self._numbers[worker_id] += 1
        assert self.index.apply(worker_id, self._numbers[worker_id], False, hashes)

    def held_chain(self) -> list[bytes]:
        """Return a prompt that everybody holds the beginning of, and two workers three quarters."""
        held = self.rng.choice(self._chains)
        return [*held, *(self.rng.randbytes(HASH_BYTES) for _ in range(PROMPT_BLOCKS - len(held)))]

    def unknown_chain(self) -> list[bytes]:
        """Return a prompt that nobody holds."""
        return [self.rng.randbytes(HASH_BYTES) for _ in range(PROMPT_BLOCKS)]

    def router(self, policy: str) -> Router:
        """Return a router that knows all this."""
        router = Router(POLICIES[policy](), Random(0))
        router.index = self.index
        router.set_workers(self._infos)
        facts = WorkerFacts(1, "m", "l", BLOCK_TOKENS, b"", 1 << 20, 1 << 17)
        for info in self._infos:
            router.welcome(info.worker_id, facts)
            router.report(info.worker_id, WorkerLoad(self.rng.randrange(5000), 0, self.rng.randrange(30)))
        return router


class _Times(NamedTuple):
    place_s: Sequence[float]
    all_s: float
    """Of placements, reports and releases together."""


def _request(number: int, chain: Sequence[bytes], rng: Random) -> PlacementRequest:
    return PlacementRequest(f"r{number}", PROMPT_BLOCKS * BLOCK_TOKENS, rng.randrange(1, 500), chain)


def _run(router: Router, requests: Sequence[PlacementRequest]) -> _Times:
    """Place, with a worker's report before each and a release after it."""
    rng, times, running = Random(1), [], deque[Reservation]()
    workers = [worker.info.worker_id for worker in router.workers]
    loads = [WorkerLoad(rng.randrange(5000), 0, rng.randrange(30)) for _ in requests]
    began = time.thread_time()
    for request, load in zip(requests, loads, strict=True):
        router.report(rng.choice(workers), load)
        begin = time.thread_time()
        reservation = router.place(request)
        times.append(time.thread_time() - begin)
        running.append(reservation)
        if len(running) > _RUNNING:
            oldest = running.popleft()
            oldest.first_token()
            oldest.release()
    all_s = time.thread_time() - began
    for reservation in running:
        reservation.release()
    return _Times(times, all_s)


def _rows(label: str, has_goal: bool, runs: Sequence[_Times]) -> list[BenchRow]:
    count = len(runs[0].place_s)
    rate = Repeated.of([count / run.all_s for run in runs])
    p99 = Repeated.of([float(np.percentile(run.place_s, 99)) * 1000 for run in runs])
    note = f"{count} placements of {PROMPT_BLOCKS} blocks, {len(runs)} repetitions, CPU time"
    return [
        BenchRow(
            f"placements: {label}",
            rate.median,
            "1/s",
            True,
            goal=_GOAL_RATE if has_goal else None,
            spread=rate.spread,
            note=f"{note}, one report and one release each included",
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


def _events_row(cluster: _Cluster) -> BenchRow:
    """Measure how many blocks a second the index takes: stored by one worker and evicted again, 64 at a time."""
    rates = []
    for _ in range(5):
        chains = [[cluster.rng.randbytes(HASH_BYTES) for _ in range(64)] for _ in range(500)]
        begin = time.thread_time()
        for chain in chains:
            cluster.store("w0", chain)
        for chain in chains:
            cluster.evict("w0", chain)
        rates.append(2 * 64 * len(chains) / (time.thread_time() - begin))
    rate = Repeated.of(rates)
    return BenchRow(
        f"cache events: {cluster.size}", rate.median, "blocks/s", True, spread=rate.spread, note="stored and evicted"
    )


def _match_rows(cluster: _Cluster, radix: dict[str, Any] | str) -> list[BenchRow]:
    """Compare how many prompts a second the index finds the holders of; `radix` is the peer's result, or why not."""
    rows = []
    for kind, key, chain in (
        ("hit-heavy", "held_s", cluster.held_chain),
        ("disjoint", "unknown_s", cluster.unknown_chain),
    ):
        prompts = [chain() for _ in range(500)]
        rate = Repeated.of([1 / _find_s(cluster.index, prompts) for _ in range(5)])
        note = f"{PROMPT_BLOCKS} blocks each; the peer, which has a thread of its own, by wall time"
        rows.append(
            BenchRow(
                f"prompts matched: {kind}, {cluster.size}",
                rate.median,
                "1/s",
                True,
                peer=None if isinstance(radix, str) else 1 / statistics.median(radix[key]),
                peer_name=_PEER_NAME,
                spread=rate.spread,
                note=radix if isinstance(radix, str) else note,
            )
        )
    return rows


def _find_s(index: PrefixIndex, prompts: Sequence[Sequence[bytes]]) -> float:
    begin = time.thread_time()
    for prompt in prompts:
        index.find(prompt)
    return (time.thread_time() - begin) / len(prompts)


def _radix(venv: Path, size: _Size, prompts: int) -> dict[str, Any] | str:
    """Return the peer's result, or why it could not be run."""
    command = [str(venv / "bin/python"), str(_PEER_SCRIPT), str(size.workers), str(size.blocks), str(prompts)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PEER_TIMEOUT_S)
        found: dict[str, Any] = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        return f"the peer failed: {error.stderr.strip().splitlines()[-1] if error.stderr.strip() else error}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"the peer could not be run: {error}"
    return found


def _bytes_row(num_workers: int, holders: int) -> BenchRow:
    """Measure with tracemalloc what the index weighs, keys included, just after its dict has grown: the worst."""
    rng, worst = Random(0), 0.0
    for count in (175_000, 350_000):
        gc.collect()
        tracemalloc.start()
        index = PrefixIndex()
        for worker in range(0, num_workers, holders):
            chain = [rng.randbytes(HASH_BYTES) for _ in range(count // num_workers)]
            for holder in range(holders):
                index.replace(f"w{worker + holder}", chain)
            del chain
        gc.collect()
        worst = max(worst, tracemalloc.get_traced_memory()[0] / index.num_blocks)
        tracemalloc.stop()
    return BenchRow(
        f"index bytes for each block of a worker, {num_workers} workers, {holders} holder{'s'[: holders - 1]} each",
        worst,
        "bytes",
        False,
        goal=_GOAL_BYTES,
        note="the larger of 175,000 and 350,000 entries",
    )


if __name__ == "__main__":
    typer.run(main)
