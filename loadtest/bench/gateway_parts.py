"""The processes of `make bench-gateway`: a backend without a model, and a gateway in front of it.

`python -m loadtest.bench.gateway_parts backend` or `... gateway` prints its addresses as one line of JSON and serves
until its standard input ends. A backend reads there how long its steps take, a line of seconds each time, and says so
when it has set them.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from baton_pb.v1 import router_pb2, worker_pb2
from cluster.fake_worker import FakeModel, FakeWorker
from cluster.gateway.server import GatewayServer
from cluster.router.server import RouterServer
from common.config import RouterConfig
from common.config_doors import GatewayConfig, HttpConfig
from loadtest.echo import EchoServer
from loadtest.echo_http import HttpEcho

MODEL = "fake"
STREAMS_MAX = 12_000
_HEARTBEAT_S = 0.5
_START_TIMEOUT_S = 60.0
_PORT_LINE_MAX = 4096
_IDLE_STEP_S = 1.0


class Part:
    """One of the processes, on one core. A context manager; afterwards it is gone."""

    def __init__(self, command: Sequence[str], core: int, is_quiet: bool = False) -> None:
        self.addresses: dict[str, Any] = {}
        """What it said when it was ready."""
        pinned = ["taskset", "-c", str(core), *command]
        self._process = subprocess.Popen(
            pinned, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if is_quiet else None
        )
        self._watched = psutil.Process(self._process.pid)

    @classmethod
    def ours(cls, core: int, *arguments: str) -> "Part":
        """Start this module in a process and wait until it serves."""
        part = cls([sys.executable, "-m", "loadtest.bench.gateway_parts", *arguments], core)
        assert part._process.stdout is not None
        part.addresses = json.loads(part._process.stdout.readline(_PORT_LINE_MAX) or "{}")
        assert part.addresses, "it serves"
        return part

    def __enter__(self) -> "Part":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def set_step(self, step_s: float) -> None:
        """Tell a backend how long its steps take from now on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{step_s}\n".encode())
        self._process.stdin.flush()
        assert json.loads(self._process.stdout.readline(_PORT_LINE_MAX))["step_s"] == step_s

    def usage(self) -> "Usage":
        """Return what it and its children have used so far."""
        family = [self._watched, *self._watched.children(recursive=True)]
        times = [process.cpu_times() for process in family]
        resident = sum(process.memory_info().rss for process in family)
        return Usage(sum(one.user + one.system for one in times), resident)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process."""

    cpu_s: float
    resident_bytes: int


async def _backend() -> None:
    """Serve the same echo three times: behind a router for our gateway, and to clients themselves by gRPC and HTTP.

    Each gives a stream its first token at once, and all streams their next one in the same step.
    """
    model = FakeModel(block_tokens=16, num_blocks=1 << 22)
    worker = await FakeWorker.start("echo", worker_pb2.WORKER_ROLE_BOTH, model)
    router = await RouterServer.start("127.0.0.1", 0, RouterConfig(), _HEARTBEAT_S)
    address = router_pb2.WorkerAddress(
        worker_id=worker.worker_id, address=worker.address, role=worker.role, node="here"
    )
    await router.set_workers([address])
    echo = await EchoServer.start()
    http = await HttpEcho.start(_IDLE_STEP_S)
    _say({"router": router.address, "grpc": echo.address, "http": http.address})
    while line := await asyncio.to_thread(sys.stdin.readline):
        step_s = worker.step_s = float(line)
        echo.service.set_tpot(step_s)
        http.set_tpot(step_s)
        _say({"step_s": step_s})


async def _gateway(router: str, model_dir: Path) -> None:
    limits = HttpConfig(keepalive_s=600.0)
    config = GatewayConfig(grpc_port=0, http_port=0, running_max=STREAMS_MAX, http=limits)
    gateway = await GatewayServer.start(config, model_dir, MODEL, router)
    _say({"grpc": gateway.grpc_address, "http": gateway.http_address})
    await asyncio.to_thread(sys.stdin.read)


def _say(what: dict[str, Any]) -> None:
    gc.collect()
    gc.freeze()  # as the process of a service does once it is up
    sys.stdout.write(json.dumps({**what, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("backend")
    gateway = parts.add_parser("gateway")
    gateway.add_argument("--router", required=True)
    gateway.add_argument("--model-dir", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(_backend() if arguments.part == "backend" else _gateway(arguments.router, arguments.model_dir))


if __name__ == "__main__":
    main()
