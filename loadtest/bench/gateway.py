"""`make bench-gateway`: what the gateway costs, without a model: a worker that echoes, one core for the gateway.

Time to the first token through the gateway less that of the same client talking to an echo server directly; requests
and tokens for each second; memory of idle streams. `vllm-router` and `sglang-router` stand in front of the same kind of
echo in the gateway's place, if loadtest/bench/peers/routers.sh could install them. The gateway has core 0 to itself;
client and backend share the last core and may be the slower part: so tokens are taken per second of processor time.
"""

import argparse
import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cluster.fake_model import write_model
from common.errors import BatonError, DeadlineError, WorkerLostError
from loadtest.bench.common import BenchRow, publish
from loadtest.bench.gateway_load import Face, GrpcFace, Samples, SseFace, run
from loadtest.bench.gateway_parts import MODEL, Part

GATEWAY_CORE = 0
TTFT_GOAL_MS, TOKENS_GOAL, IDLE_GOAL_GIB = 2.0, 20_000.0, 1.0
_PEERS = {
    "vllm-router": ["vllm-router"],
    "sglang-router": ["sglang-router", "launch"],
}
_READY_S = 30.0
_WAVE = 250


class Shape(NamedTuple):
    """A load: so many streams, each asking again when its answer has ended."""

    streams: int
    max_tokens: int
    step_s: float
    """Time between two tokens of a stream."""


PACED = (Shape(1, 2, 0.02), Shape(64, 20, 0.05), Shape(256, 20, 0.05))
SHORT = (Shape(1, 1, 0.0), Shape(64, 1, 0.0), Shape(256, 1, 0.0))
LONG = (Shape(64, 400, 0.002), Shape(256, 400, 0.005))


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one server."""

    samples: Samples
    cpu_s: float
    """Of the server's processes."""

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens for each second of processor time."""
        return self.samples.num_tokens / self.cpu_s

    @property
    def requests_per_cpu_s(self) -> float:
        """Requests for each second of processor time."""
        return len(self.samples.ttft_s) / self.cpu_s


def main() -> None:
    """Run all loads and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each load")
    parser.add_argument("--peers", type=Path, help="the venv that loadtest/bench/peers/routers.sh made")
    parser.add_argument("--idle", type=int, default=10_000, help="idle streams; 0: leave that part out")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        bench = _Bench(write_model(Path(folder)), cores[-1], arguments.seconds, arguments.peers)
        rows = bench.rows("gRPC") + bench.rows("SSE")
        if arguments.idle:
            rows += [bench.idle_row("gRPC", arguments.idle), bench.idle_row("SSE", arguments.idle)]
    publish("gateway", rows)


class _Bench:
    """The settings of all loads."""

    def __init__(self, model_dir: Path, core: int, seconds: float, peers: Path | None) -> None:
        self._model_dir = model_dir
        self._core = core
        self._seconds = seconds
        self._peers = peers

    def rows(self, kind: str) -> list[BenchRow]:
        """Return the rows of one API, `gRPC` or `SSE`; only the second has peers."""
        rows: list[BenchRow] = []
        for shape in PACED:
            rows += _ttft_rows(kind, shape, self._measure(kind, shape))
        for shape in SHORT:
            rows += _request_rows(kind, shape, self._measure(kind, shape))
        for shape in LONG:
            rows += _token_rows(kind, shape, self._measure(kind, shape))
        return rows

    def idle_row(self, kind: str, count: int) -> BenchRow:
        """Return what streams that have had their first token and wait for the next weigh in the gateway."""
        shape = Shape(count, 400, 3600.0)
        with self._servers(shape) as (_, gateway):
            before = gateway.usage().resident_bytes
            held, after = asyncio.run(_hold(_face(kind, gateway, MODEL), count, gateway))
        gib = after / 2**30
        note = f"{held} streams; {before / 2**20:.0f} MiB before, {(after - before) / count / 1024:.1f} KiB for each"
        return BenchRow(f"{kind}: memory of {count} idle streams", gib, "GiB", False, goal=IDLE_GOAL_GIB, note=note)

    def _measure(self, kind: str, shape: Shape) -> dict[str, Measured | str]:
        """Return what each server showed, or why it showed nothing."""
        found: dict[str, Measured | str] = {}
        with self._servers(shape) as (backend, gateway):
            found["direct"] = self._load(backend, _face(kind, backend, "echo"), shape)
            found["ours"] = self._load(gateway, _face(kind, gateway, MODEL), shape)
            for name in _PEERS if kind == "SSE" and self._peers is not None else ():
                try:
                    with self._peer(name, backend) as (part, port):
                        found[name] = self._load(part, partial(SseFace, f"127.0.0.1:{port}", "echo"), shape)
                except (BatonError, OSError) as error:
                    found[name] = str(error)
        return found

    def _load(self, part: Part, make: Callable[[], Face], shape: Shape) -> Measured:
        async def load() -> Measured:
            face = make()
            try:
                begin = part.usage().cpu_s
                spread_s = shape.max_tokens * shape.step_s
                samples = await run(face, shape.streams, shape.max_tokens, self._seconds, spread_s)
                return Measured(samples, part.usage().cpu_s - begin)
            finally:
                await face.close()

        return asyncio.run(load())

    @contextmanager
    def _servers(self, shape: Shape) -> Iterator[tuple[Part, Part]]:
        with Part.ours(self._core, "backend", "--step-s", str(shape.step_s)) as backend:
            behind = ["gateway", "--router", backend.addresses["router"], "--model-dir", str(self._model_dir)]
            with Part.ours(GATEWAY_CORE, *behind) as gateway:
                yield backend, gateway

    @contextmanager
    def _peer(self, name: str, backend: Part) -> Iterator[tuple[Part, int]]:
        """Start a router in front of the backend's HTTP echo."""
        assert self._peers is not None
        program, *arguments = _PEERS[name]
        port, metrics_port = _free_port(), _free_port()
        url = f"http://{backend.addresses['http']}"
        settings = ["--worker-urls", url, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        settings += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
        with Part([str(self._peers / "bin" / program), *arguments, *settings], GATEWAY_CORE, is_quiet=True) as part:
            _wait_for(port, part, name)
            yield part, port


def _ttft_rows(kind: str, shape: Shape, found: dict[str, "Measured | str"]) -> list[BenchRow]:
    rows = []
    ours, direct = _of(found, "ours"), _of(found, "direct")
    for percentile in (50, 99):
        base = direct.samples.ttft_ms(percentile)
        added = ours.samples.ttft_ms(percentile) - base
        goal = TTFT_GOAL_MS if shape.streams == 64 and percentile == 50 else None
        note = (
            f"{base:.2f} ms direct; {len(ours.samples.ttft_s)} requests of {shape.max_tokens} tokens, "
            f"{shape.step_s:g} s apart"
        )
        label = f"{kind}: added TTFT p{percentile}, {shape.streams} streams"
        value = partial(_added_ms, percentile=percentile, base=base)
        rows += _with_peers(label, added, "ms", False, found, value, goal, note)
    return rows


def _added_ms(measured: Measured, percentile: float, base: float) -> float:
    return measured.samples.ttft_ms(percentile) - base


def _request_rows(kind: str, shape: Shape, found: dict[str, "Measured | str"]) -> list[BenchRow]:
    ours, direct = _of(found, "ours"), _of(found, "direct")
    note = f"{ours.requests_per_cpu_s:.0f} for each CPU second; direct {direct.samples.requests_per_s:.0f}"
    label = f"{kind}: requests of one token, {shape.streams} at once"
    return _with_peers(
        label, ours.samples.requests_per_s, "1/s", True, found, lambda m: m.samples.requests_per_s, None, note
    )


def _token_rows(kind: str, shape: Shape, found: dict[str, "Measured | str"]) -> list[BenchRow]:
    ours, direct = _of(found, "ours"), _of(found, "direct")
    offered = shape.streams / shape.step_s
    note = (
        f"{ours.samples.tokens_per_s:.0f}/s seen, {ours.cpu_s / ours.samples.wall_s:.0%} of the core busy, "
        f"{offered:.0f}/s possible; direct {direct.samples.tokens_per_s:.0f}/s"
    )
    label = f"{kind}: tokens for each CPU second, {shape.streams} streams"
    goal = TOKENS_GOAL if kind == "gRPC" and shape == LONG[-1] else None
    return _with_peers(label, ours.tokens_per_cpu_s, "1/s", True, found, lambda m: m.tokens_per_cpu_s, goal, note)


def _with_peers(
    label: str,
    ours: float,
    unit: str,
    is_higher_better: bool,
    found: dict[str, "Measured | str"],
    value: Callable[["Measured"], float],
    goal: float | None,
    note: str,
) -> list[BenchRow]:
    """Return one row for each peer, or one without a peer."""
    peers = [name for name in found if name not in ("ours", "direct")]
    if not peers:
        return [BenchRow(label, ours, unit, is_higher_better, goal=goal, note=note)]
    rows = []
    for name in peers:
        peer = found[name]
        seen, why = (value(peer), note) if isinstance(peer, Measured) else (None, f"{note}; {name}: {peer}")
        rows.append(BenchRow(label, ours, unit, is_higher_better, seen, name, goal, note=why))
    return rows


def _of(found: dict[str, "Measured | str"], name: str) -> Measured:
    measured = found[name]
    assert isinstance(measured, Measured)
    return measured


async def _hold(make: Callable[[], Face], count: int, part: Part) -> tuple[int, int]:
    """Open streams, a wave at a time, and wait until each has had its first token.

    Returns:
        How many there are, and the memory that the part has with them.
    """
    face, begun = make(), 0
    try:
        for first in range(0, count, _WAVE):
            async with asyncio.timeout(_READY_S):
                slots = range(first, min(count, first + _WAVE))
                await asyncio.gather(*(face.begin(slot, 400) for slot in slots))
                begun += len(slots)
        return begun, part.usage().resident_bytes
    finally:
        await face.close()


def _face(kind: str, part: Part, model: str) -> Callable[[], Face]:
    if kind == "gRPC":
        return lambda: GrpcFace(part.addresses["grpc"])
    return lambda: SseFace(part.addresses["http"], model)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, part: Part, name: str) -> None:
    """Wait until somebody listens; a peer announces it in no other way.

    Raises:
        WorkerLostError: it ended instead.
        DeadlineError: nobody does.
    """
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if not part.is_alive:
            raise WorkerLostError(f"{name} ended")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise DeadlineError(f"{name} does not listen")


if __name__ == "__main__":
    main()
