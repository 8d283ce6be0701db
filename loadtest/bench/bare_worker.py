"""One worker in a plain process, without Ray: `python -m loadtest.bench.bare_worker SETTINGS`.

Prints its gRPC address, serves until its standard input ends, and stops. Benchmarks start it where Ray would be in the
way, e.g. in a network namespace.
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cluster.launcher.worker_actor import open_worker
from common.config import ClusterConfig
from common.config_file import load

_CLASSES = {"prefill": "prefill.worker:PrefillWorker", "decode": "decode.worker:DecodeWorker"}


@dataclass(frozen=True, slots=True)
class BareWorker:
    """What the process needs to know; `overrides` are `a.b=c` settings of a cluster."""

    role: Literal["prefill", "decode"]
    host: str
    model_dir: str
    overrides: list[str]

    def command(self) -> list[str]:
        """Return the command that serves it."""
        return [sys.executable, "-m", "loadtest.bench.bare_worker", json.dumps(asdict(self))]


async def serve(worker: BareWorker, config: ClusterConfig) -> None:
    """Serve until standard input ends."""
    hosted = await open_worker(
        host=worker.host,
        worker_class=_CLASSES[worker.role],
        worker_id=f"{worker.role}-0",
        model_dir=Path(worker.model_dir),
        model_id="bench",
        engine=config.engine,
        role=config.prefill if worker.role == "prefill" else config.decode,
        transfer=config.transfer,
        heartbeat_s=config.supervisor.heartbeat_s,
    )
    print(hosted.addresses()["grpc"], flush=True)  # noqa: T201  # to whoever started this process
    try:
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        failed = asyncio.create_task(hosted.wait_failed())
        await asyncio.wait([ended, failed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await hosted.stop(0.0)


def main() -> None:
    """Read the settings and serve."""
    worker = BareWorker(**json.loads(sys.argv[1]))
    asyncio.run(serve(worker, load(None, worker.overrides)))


if __name__ == "__main__":
    main()
