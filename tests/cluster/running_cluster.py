"""A fake cluster that runs on a thread of its own, for tests that drive a gateway by synchronous means."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.fake_cluster import LIMIT_S, FakeCluster, fake_cluster


@contextmanager
def running_cluster(model_dir: Path, **settings: Any) -> Iterator[FakeCluster]:
    """Start a cluster; at the end nothing may be left of it. Its loop is not the caller's: look at addresses only."""
    ready: Future[FakeCluster] = Future()
    stopped: Future[asyncio.Event] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        stopped.set_result(stop)
        async with fake_cluster(model_dir, **settings) as cluster:
            ready.set_result(cluster)
            await stop.wait()

    failures: list[BaseException] = []

    def run() -> None:
        try:
            with asyncio.Runner() as runner:
                loops.append(runner.get_loop())
                runner.run(serve())
        except BaseException as error:  # the test raises it
            failures.append(error)
            if not ready.done():
                ready.set_exception(error)

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=run, name="cluster")
    thread.start()
    try:
        yield ready.result(3 * LIMIT_S)
    finally:
        stop = stopped.result(LIMIT_S)
        if not failures:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(6 * LIMIT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
