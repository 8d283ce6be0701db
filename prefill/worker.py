"""A prefill worker: one engine, one endpoint, one loop, and the gRPC service that decode workers call."""

from pathlib import Path
from typing import Self

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.clock import Clock, MonotonicClock
from common.config import EngineConfig, PrefillConfig, TransferConfig
from common.status import rpc_errors_to_status
from engine.engine import Engine
from engine.placement import Placement
from engine.prefix_loader import PrefixLoader
from engine.rpc_server import deadline
from engine.service import Identity
from engine.worker import Worker, start_worker
from kvtransfer.interface import Endpoint
from prefill.handoff import Handoff
from prefill.loop import Prefilled, PrefillLoop


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


class PrefillWorker(Worker):
    """Everything of one prefill worker."""

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
        """See Worker."""
        loader = PrefixLoader(engine, endpoint, worker_id)
        self.loop = PrefillLoop(worker_id, engine, loader, config, clock or MonotonicClock())
        limits = worker_pb2.WorkerLimits(waiting_max=config.waiting_max, token_budget=config.token_budget)
        identity = Identity(worker_id, worker_pb2.WORKER_ROLE_PREFILL, heartbeat_s, limits)
        super().__init__(identity, host, engine, endpoint, loader, self.loop)
        worker_pb2_grpc.add_PrefillServicer_to_server(PrefillService(self.loop, endpoint, engine), self.rpc.server)

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
        return await start_worker(
            lambda loaded, endpoint: cls(worker_id, host, loaded, endpoint, role, heartbeat_s),
            worker_id,
            host,
            model_dir,
            model_id,
            engine,
            transfer,
            Placement.of(worker_id, role.cores, engine.threads, role.nice),
        )


def _first_token_pb(prefilled: Prefilled) -> worker_pb2.FirstToken:
    return worker_pb2.FirstToken(
        token=prefilled.output.to_pb(),
        cached_tokens=prefilled.num_cached,
        queue_s=prefilled.queue_s,
        prefill_s=prefilled.prefill_s,
        device_s=prefilled.device_s,
    )
