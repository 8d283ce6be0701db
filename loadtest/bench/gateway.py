"""`make bench-gateway`: what the gateway costs, without a model: a worker that echoes, one core for the gateway.

Four servers for the same client, which sits on the last core beside the backend and knows each protocol by its bytes
(gateway_h2.py and gateway_load.py: it costs a tenth of what a usual client does, and so delays little):

- `direct`: the backend itself, by gRPC or server-sent events
- ours: a gateway on core 0; behind it a worker without a model and a router, both in the backend's process
- `vllm-router` and `sglang-router`, each on core 0 while it is measured, before the backend's HTTP echo; if
  loadtest/bench/peers/routers.sh could install them, and for server-sent events only

All backends do the same: a stream has its first token at once, and all streams their next ones in the same step, as a
batch does. Three loads:

- added TTFT: requests come by chance at a rate that keeps so many streams running (Poisson, the same times for every
  server), whatever becomes of those before. Its percentile less that of `direct`. Servers take turns, and all their
  turns count together.
- requests of one token, so many at once, each asked when the one before has ended: a closed loop
- tokens, so many long streams at once, each with more tokens due than the gateway can relay one by one: what it relays
  for each second of its processor time

And what 10,000 streams weigh that have begun and wait.
"""

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cluster.fake_model import write_model
from common.errors import BatonError, DeadlineError, WorkerLostError
from loadtest.bench.common import BenchRow, publish
from loadtest.bench.gateway_load import Face, GrpcFace, Samples, SseFace, poisson, run, run_paced, warm_up
from loadtest.bench.gateway_parts import MODEL, Part
from loadtest.bench.gateway_rows import LONG, PACED, SHORT, Found, Measured, Shape, request_rows, token_rows, ttft_rows

GATEWAY_CORE = 0
IDLE_GOAL_GIB = 1.0
_PEERS = {
    "vllm-router": ["vllm-router"],
    "sglang-router": ["sglang-router", "launch"],
}
_READY_S = 30.0
_WAVE = 250
_TURNS = 2
"""Of each server, for times to the first token."""
_SLOTS = 2
"""Connections for each stream that runs on average; it is by chance that more run."""
_SEED = 11
_IDLE_STEP_S = 3600.0


class Server(NamedTuple):
    """What is measured, and how it is asked."""

    part: Part
    face: Callable[[], Face]


def main() -> None:
    """Run all loads and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each load; half as long without pauses")
    parser.add_argument("--peers", type=Path, help="the venv that loadtest/bench/peers/routers.sh made")
    parser.add_argument("--idle", type=int, default=10_000, help="idle streams; 0: leave that part out")
    parser.add_argument("--only", choices=("paced", "short", "long"), help="one kind of load, and no idle streams")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        model_dir = write_model(Path(folder))
        with _servers(model_dir, cores[-1]) as (backend, gateway), ExitStack() as peers:
            bench = _Bench(backend, gateway, _started_peers(peers, arguments.peers, backend), arguments.seconds)
            rows = [row for kind in ("gRPC", "SSE") for row in bench.rows(kind, arguments.only)]
        if arguments.idle and arguments.only is None:
            rows += [_idle_row(kind, arguments.idle, model_dir, cores[-1]) for kind in ("gRPC", "SSE")]
    publish("gateway", rows)


class _Bench:
    """The servers, and how long each load lasts."""

    def __init__(self, backend: Part, gateway: Part, peers: Mapping[str, Server | str], seconds: float) -> None:
        self._backend = backend
        self._gateway = gateway
        self._peers = peers
        self._seconds = seconds

    def rows(self, kind: str, only: str | None) -> list[BenchRow]:
        """Return the rows of one API, `gRPC` or `SSE`; only the second has peers."""
        rows: list[BenchRow] = []
        for shape in PACED if only in (None, "paced") else ():
            rows += _rows(ttft_rows, kind, shape, self._measure(kind, shape, self._paced, _TURNS))
        for shape in SHORT if only in (None, "short") else ():
            rows += _rows(request_rows, kind, shape, self._measure(kind, shape, self._busy, 1))
        for shape in LONG if only in (None, "long") else ():
            rows += _rows(token_rows, kind, shape, self._measure(kind, shape, self._busy, 1))
        return rows

    def _measure(self, kind: str, shape: Shape, load: "Load", turns: int) -> Found:
        self._backend.set_step(shape.step_s)
        servers: dict[str, Server | str] = {
            "direct": Server(self._backend, _face(kind, self._backend, "echo")),
            "ours": Server(self._gateway, _face(kind, self._gateway, MODEL)),
        }
        if kind == "SSE":
            servers |= self._peers
        found: Found = {}
        for turn in range(turns):
            for name, server in servers.items():
                measured = server if isinstance(server, str) else _loaded(server, shape, turn, load)
                before = found.get(name)
                if isinstance(before, Measured) and isinstance(measured, Measured):
                    measured = before.with_more(measured)
                found[name] = before if isinstance(before, str) else measured
        return found

    async def _paced(self, face: Face, shape: Shape, turn: int) -> Samples:
        arrivals = poisson(shape.streams / shape.life_s, shape.life_s + self._seconds, _SEED + turn)
        return await run_paced(face, arrivals, shape.max_tokens, shape.life_s, _SLOTS * shape.streams)

    async def _busy(self, face: Face, shape: Shape, turn: int) -> Samples:
        del turn
        return await run(face, shape.streams, shape.max_tokens, self._seconds / 2)


def _rows(make: Callable[[str, Shape, Found], list[BenchRow]], kind: str, shape: Shape, found: Found) -> list[BenchRow]:
    """Return a load's rows; none, and a word about it, if ours or the backend failed under it: others still count."""
    try:
        return make(kind, shape, found)
    except BatonError as error:
        sys.stderr.write(f"left out: {kind}, {shape.streams} streams of {shape.max_tokens} tokens: {error.message}\n")
        return []


Load = Callable[[Face, Shape, int], Coroutine[Any, Any, Samples]]
"""Puts a load on a server; the number is of the server's turn."""


def _loaded(server: Server, shape: Shape, turn: int, load: Load) -> Measured | str:
    """Return what a server showed, or what went wrong."""

    async def measure() -> Measured:
        face = server.face()
        try:
            await warm_up(face, _SLOTS * shape.streams, shape.max_tokens)
            begin = server.part.usage().cpu_s
            samples = await load(face, shape, turn)
            return Measured(samples, server.part.usage().cpu_s - begin)
        finally:
            await face.close()

    try:
        return asyncio.run(measure())
    except (BatonError, OSError) as error:
        return str(error)
    except ExceptionGroup as group:
        return str(group.exceptions[0])


@contextmanager
def _servers(model_dir: Path, core: int) -> Iterator[tuple[Part, Part]]:
    with Part.ours(core, "backend") as backend:
        behind = ["gateway", "--router", backend.addresses["router"], "--model-dir", str(model_dir)]
        with Part.ours(GATEWAY_CORE, *behind) as gateway:
            yield backend, gateway


def _started_peers(stack: ExitStack, venv: Path | None, backend: Part) -> dict[str, Server | str]:
    """Start the routers in front of the backend's HTTP echo; say why one cannot be had."""
    found: dict[str, Server | str] = {}
    for name in _PEERS if venv is not None else ():
        assert venv is not None
        try:
            part, port = stack.enter_context(_peer(name, venv, backend))
            found[name] = Server(part, partial(SseFace, f"127.0.0.1:{port}", "echo"))
        except (BatonError, OSError) as error:
            found[name] = str(error)
    return found


@contextmanager
def _peer(name: str, venv: Path, backend: Part) -> Iterator[tuple[Part, int]]:
    program, *arguments = _PEERS[name]
    port, metrics_port = _free_port(), _free_port()
    url = f"http://{backend.addresses['http']}"
    settings = ["--worker-urls", url, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    settings += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
    with Part([str(venv / "bin" / program), *arguments, *settings], GATEWAY_CORE, is_quiet=True) as part:
        _wait_for(port, part, name)
        yield part, port


def _idle_row(kind: str, count: int, model_dir: Path, core: int) -> BenchRow:
    """Return what streams that have had their first token and wait for the next weigh in a gateway of its own."""
    with _servers(model_dir, core) as (backend, gateway):
        backend.set_step(_IDLE_STEP_S)
        before, begin = gateway.usage().resident_bytes, time.monotonic()
        held, after = asyncio.run(_hold(_face(kind, gateway, MODEL), count, gateway))
        took_s = time.monotonic() - begin
    gib = after / 2**30
    note = (
        f"{held} streams, opened in {took_s:.0f} s; {before / 2**20:.0f} MiB before, "
        f"{(after - before) / count / 1024:.1f} KiB for each"
    )
    return BenchRow(f"{kind}: memory of {count} idle streams", gib, "GiB", False, goal=IDLE_GOAL_GIB, note=note)


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
