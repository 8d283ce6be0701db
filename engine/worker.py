"""A worker's life: an engine, a transfer endpoint, a loop and a gRPC server, started and stopped in order."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.config import EngineConfig, TransferConfig
from common.errors import BatonError, WorkerLostError
from common.logs import log
from engine.codec_bound import CodecBound
from engine.engine import Engine
from engine.holder import HolderService, HoldingLoop
from engine.placement import Placement
from engine.prefix_loader import PrefixLoader
from engine.rpc_server import RpcServer
from engine.service import Identity, ServedLoop, WorkerService
from engine.step_runner import Work
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.interface import Endpoint

_logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
"""How long running calls may take to end after what they wait for was failed."""


class WorkerLoop(ServedLoop, HoldingLoop, Protocol):
    """The loop of prefill or decode, as its worker sees it."""

    def fail_all(self, error: BatonError) -> None:
        """End everything that is under way."""
        ...

    async def close(self) -> None:
        """Stop stepping and wait for all tasks. Nothing is under way any more."""
        ...


class Worker:
    """What prefill and decode workers have in common. `engine` and `endpoint` become its own: it closes them.

    Subclasses make the loop and add their own service to `rpc`.
    """

    def __init__(
        self, identity: Identity, host: str, engine: Engine, endpoint: Endpoint, loader: PrefixLoader, loop: WorkerLoop
    ) -> None:
        """Bind a port of `host`; `serve` does the rest. Must be called on the worker's asyncio loop."""
        self.worker_id = identity.worker_id
        self.engine = engine
        self.endpoint = endpoint
        self.service = WorkerService(identity, engine, endpoint, loop)
        self.rpc = RpcServer.bind(host)
        self.address = self.rpc.address
        self._role = worker_pb2.WorkerRole.Name(identity.role).removeprefix("WORKER_ROLE_").lower()
        self._loader = loader
        self._loop = loop
        self._tiers: Work | None = None
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.rpc.server)
        worker_pb2_grpc.add_HolderServicer_to_server(HolderService(engine, endpoint, loop), self.rpc.server)

    async def serve(self) -> None:
        """Run the loop and answer calls."""
        self._loop.runner.start()
        if self.engine.tiers is not None:
            self._tiers = self._loop.runner.spawn(self.engine.tiers.run(), "tiers")
        await self.rpc.start()
        log(_logger, logging.INFO, f"{self._role} worker serves", worker_id=self.worker_id, address=self.address)

    async def wait_failed(self) -> None:
        """Return after `stop`; raise when the loop has crashed.

        Raises:
            WorkerLostError: with the crash as its cause.
        """
        await self._loop.runner.wait_failed()

    async def stop(self, drain_timeout_s: float) -> None:
        """Refuse new requests, give the running ones `drain_timeout_s`, fail what is left, and close everything."""
        await self.rpc.set_serving(False)
        unfinished = await self._loop.drain(drain_timeout_s)
        self._loop.fail_all(WorkerLostError(f"worker {self.worker_id} is stopping"))
        await self.rpc.stop(STOP_GRACE_S)
        if self._tiers is not None:
            self._tiers.cancel()
        await self._loop.close()
        await self._loader.close()
        await self.endpoint.close()
        self.engine.close()
        log(_logger, logging.INFO, f"{self._role} worker stopped", worker_id=self.worker_id, unfinished=unfinished)


W = TypeVar("W", bound=Worker)


async def start_worker(
    make: Callable[[Engine, Endpoint], W],
    worker_id: str,
    host: str,
    model_dir: Path,
    model_id: str,
    engine: EngineConfig,
    transfer: TransferConfig,
    placement: Placement,
) -> W:
    """Load the model, open the transfer endpoint, make the worker of them, and serve.

    The model is loaded on a thread that is placed as the steps' will be, since backends start their own threads then.
    `placement` is the engine's from here on, and released with it.

    Raises:
        ConfigError: a model or setting that this machine cannot serve.
    """
    bound = CodecBound.of(engine, transfer)
    thread = ThreadPoolExecutor(1, f"{worker_id}-load", initializer=placement.take)
    try:
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(thread, Engine.load, model_dir, engine, model_id, bound)
    except BaseException:
        placement.release()
        raise
    finally:
        thread.shutdown(wait=False)
    loaded.placement = placement
    try:
        loaded.open_tiers(engine, worker_id, model_dir)
        endpoint = await TransferEndpoint.start(worker_id, host, loaded.kv, transfer)
        try:
            worker = make(loaded, endpoint)
            await worker.serve()
        except BaseException:
            await endpoint.close()
            raise
    except BaseException:
        loaded.close()
        raise
    return worker
