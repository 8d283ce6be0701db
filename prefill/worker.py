"""A prefill worker: one engine, one endpoint, one loop, and the gRPC service that decode workers call."""

import asyncio
import logging
from pathlib import Path
from typing import Self

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.clock import Clock, MonotonicClock
from common.config import EngineConfig, PrefillConfig, TransferConfig
from common.errors import WorkerLostError
from common.logs import log
from common.status import rpc_errors_to_status
from engine.engine import Engine
from engine.holder import HolderService
from engine.prefix_fetch import PrefixFetcher
from engine.rpc_server import RpcServer, deadline
from engine.service import Identity, WorkerService
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.interface import Endpoint
from prefill.handoff import Handoff
from prefill.loop import Prefilled, PrefillLoop

_logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
"""How long running calls may take to end after they were failed."""


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """`Prefill`: from a request to its first token and its KV at the caller's."""

    def __init__(self, loop: PrefillLoop, endpoint: Endpoint, engine: Engine) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._engine = engine

    # The stubs know generators only; with `context.write` the end of the call is seen here, in `finally`.
    async def Prefill(  # type: ignore[override]  # noqa: N802  # the protocol's name
        self,
        request: worker_pb2.PrefillRequest,
        context: "grpc.aio.ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillUpdate]",
    ) -> None:
        """Prefill the prompt, send its first token, then wait for the push to be confirmed."""
        async with rpc_errors_to_status(context), deadline(request.timeout_s):
            sequence = self._engine.sequence_from_pb(request)
            await self._engine.prepare(sequence)
            holder = request.prefix_holder if request.HasField("prefix_holder") else None
            handoff = Handoff(self._loop, self._endpoint, sequence, request.ticket, holder)
            try:
                first_token = await handoff.first_token()
                await context.write(worker_pb2.PrefillUpdate(first_token=_first_token_pb(first_token)))
                report = await handoff.pushed()
                pushed = worker_pb2.Pushed(transport=report.transport, num_bytes=report.num_bytes)
                await context.write(worker_pb2.PrefillUpdate(pushed=pushed))
            finally:
                handoff.cancel()


class PrefillWorker:
    """Everything of one prefill worker, and its life. `engine` and `endpoint` become its own: it closes them."""

    def __init__(
        self,
        worker_id: str,
        host: str,
        engine: Engine,
        endpoint: Endpoint,
        config: PrefillConfig,
        heartbeat_s: float,
        clock: Clock | None = None,
    ) -> None:
        """Bind a port of `host`; `serve` does the rest. Must be called on the worker's asyncio loop."""
        self.worker_id = worker_id
        self.engine = engine
        self.endpoint = endpoint
        self._fetcher = PrefixFetcher(engine, endpoint, worker_id)
        self.loop = PrefillLoop(worker_id, engine, self._fetcher, config, clock or MonotonicClock())
        limits = worker_pb2.WorkerLimits(waiting_max=config.waiting_max, token_budget=config.token_budget)
        identity = Identity(worker_id, worker_pb2.WORKER_ROLE_PREFILL, heartbeat_s, limits)
        self.service = WorkerService(identity, engine, endpoint, self.loop)
        self._rpc = RpcServer.bind(host)
        self.address = self._rpc.address
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self._rpc.server)
        worker_pb2_grpc.add_HolderServicer_to_server(HolderService(engine, endpoint, self.loop), self._rpc.server)
        worker_pb2_grpc.add_PrefillServicer_to_server(PrefillService(self.loop, endpoint, engine), self._rpc.server)

    @classmethod
    async def start(
        cls,
        worker_id: str,
        host: str,
        model_dir: Path,
        model_id: str,
        engine: EngineConfig,
        role: PrefillConfig,
        transfer: TransferConfig,
        heartbeat_s: float,
    ) -> Self:
        """Load the model, open the transfer endpoint, and serve.

        Raises:
            ConfigError: a model or setting that this machine cannot serve.
        """
        loaded = await asyncio.to_thread(Engine.load, model_dir, engine, model_id)
        try:
            endpoint = await TransferEndpoint.start(worker_id, host, loaded.kv, transfer)
            try:
                worker = cls(worker_id, host, loaded, endpoint, role, heartbeat_s)
                await worker.serve()
            except BaseException:
                await endpoint.close()
                raise
        except BaseException:
            loaded.close()
            raise
        return worker

    async def serve(self) -> None:
        """Run the loop and answer calls."""
        self.loop.runner.start()
        await self._rpc.start()
        log(_logger, logging.INFO, "prefill worker serves", worker_id=self.worker_id, address=self.address)

    async def wait_failed(self) -> None:
        """Return after `stop`; raise when the loop has crashed.

        Raises:
            WorkerLostError: with the crash as its cause.
        """
        await self.loop.runner.wait_failed()

    async def stop(self, drain_timeout_s: float) -> None:
        """Refuse new prompts, give the running ones `drain_timeout_s`, fail what is left, and close everything."""
        await self._rpc.set_serving(False)
        unfinished = await self.loop.drain(drain_timeout_s)
        self.loop.fail_all(WorkerLostError(f"worker {self.worker_id} is stopping"))
        await self._rpc.stop(STOP_GRACE_S)
        await self.loop.runner.stop()
        await self._fetcher.close()
        await self.endpoint.close()
        self.engine.close()
        log(_logger, logging.INFO, "prefill worker stopped", worker_id=self.worker_id, unfinished=unfinished)


def _first_token_pb(prefilled: Prefilled) -> worker_pb2.FirstToken:
    return worker_pb2.FirstToken(
        token=prefilled.output.to_pb(),
        cached_tokens=prefilled.num_cached,
        queue_s=prefilled.queue_s,
        prefill_s=prefilled.prefill_s,
    )
