"""A decode worker: one engine, one endpoint, one loop, and the gRPC service that gateways keep a stream to."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.clock import Clock, MonotonicClock
from common.config import DecodeConfig, EngineConfig, TransferConfig
from common.errors import InvalidRequestError, WorkerLostError
from common.logs import log
from common.status import rpc_errors_to_status
from decode.loop import DecodeLoop
from decode.session import GatewaySession
from engine.engine import Engine
from engine.holder import HolderService
from engine.prefix_fetch import PrefixFetcher
from engine.rpc_server import RpcServer
from engine.service import Identity, WorkerService
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.interface import Endpoint

_logger = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
"""How long sessions may take to send what their streams ended with."""

Commands = AsyncIterator[worker_pb2.DecodeCommand]


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """`Session`: a gateway's commands in, its sequences' tokens out."""

    def __init__(self, loop: DecodeLoop) -> None:
        self._loop = loop

    # The stubs know generators only; with `context.write` the end of the call is seen here, in `finally`.
    async def Session(  # type: ignore[override]  # noqa: N802  # the protocol's name
        self,
        request_iterator: Commands,
        context: "grpc.aio.ServicerContext[worker_pb2.DecodeCommand, worker_pb2.DecodeStep]",
    ) -> None:
        """Serve one gateway until it leaves, then cancel its sequences."""
        async with rpc_errors_to_status(context):
            session = self._loop.join(await _attach(request_iterator))
            reader = asyncio.create_task(self._read(session, request_iterator))
            writer = asyncio.create_task(_write(session, context))
            either: list[asyncio.Future[Any]] = [reader, writer, session.broken]
            try:
                done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()
            finally:
                self._loop.leave(session)
                reader.cancel()
                writer.cancel()

    async def _read(self, session: GatewaySession, commands: Commands) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    self._loop.start(session, command.start)
                case "cancel":
                    cancel = command.cancel
                    self._loop.cancel(session, cancel.request_id, cancel.wants_summary)
                case "attach":
                    raise InvalidRequestError(f"gateway {session.gateway_id} is attached already")
                case None:
                    raise InvalidRequestError("a command that this worker does not know")


class DecodeWorker:
    """Everything of one decode worker, and its life. `engine` and `endpoint` become its own: it closes them."""

    def __init__(
        self,
        worker_id: str,
        host: str,
        engine: Engine,
        endpoint: Endpoint,
        config: DecodeConfig,
        heartbeat_s: float,
        is_colocated: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Bind a port of `host`; `serve` does the rest. Must be called on the worker's asyncio loop."""
        self.worker_id = worker_id
        self.engine = engine
        self.endpoint = endpoint
        self._fetcher = PrefixFetcher(engine, endpoint, worker_id)
        self.loop = DecodeLoop(worker_id, engine, endpoint, self._fetcher, config, clock or MonotonicClock())
        role = worker_pb2.WORKER_ROLE_BOTH if is_colocated else worker_pb2.WORKER_ROLE_DECODE
        limits = worker_pb2.WorkerLimits(
            running_max=config.running_max, waiting_max=config.waiting_max, token_budget=config.token_budget
        )
        self.service = WorkerService(Identity(worker_id, role, heartbeat_s, limits), engine, endpoint, self.loop)
        self._rpc = RpcServer.bind(host)
        self.address = self._rpc.address
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self._rpc.server)
        worker_pb2_grpc.add_HolderServicer_to_server(HolderService(engine, endpoint, self.loop), self._rpc.server)
        worker_pb2_grpc.add_DecodeServicer_to_server(DecodeService(self.loop), self._rpc.server)

    @classmethod
    async def start(
        cls,
        worker_id: str,
        host: str,
        model_dir: Path,
        model_id: str,
        engine: EngineConfig,
        role: DecodeConfig,
        transfer: TransferConfig,
        heartbeat_s: float,
        is_colocated: bool = False,
    ) -> Self:
        """Load the model, open the transfer endpoint, and serve. `is_colocated`: its role is `both`.

        Raises:
            ConfigError: a model or setting that this machine cannot serve.
        """
        loaded = await asyncio.to_thread(Engine.load, model_dir, engine, model_id)
        try:
            endpoint = await TransferEndpoint.start(worker_id, host, loaded.kv, transfer)
            try:
                worker = cls(worker_id, host, loaded, endpoint, role, heartbeat_s, is_colocated)
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
        log(_logger, logging.INFO, "decode worker serves", worker_id=self.worker_id, address=self.address)

    async def wait_failed(self) -> None:
        """Return after `stop`; raise when the loop has crashed.

        Raises:
            WorkerLostError: with the crash as its cause.
        """
        await self.loop.runner.wait_failed()

    async def stop(self, drain_timeout_s: float) -> None:
        """Refuse new requests, give the running ones `drain_timeout_s`, fail what is left, and close everything."""
        await self._rpc.set_serving(False)
        unfinished = await self.loop.drain(drain_timeout_s)
        self.loop.fail_all(WorkerLostError(f"worker {self.worker_id} is stopping"))
        await self._rpc.stop(STOP_GRACE_S)
        await self.loop.close()
        await self._fetcher.close()
        await self.endpoint.close()
        self.engine.close()
        log(_logger, logging.INFO, "decode worker stopped", worker_id=self.worker_id, unfinished=unfinished)


async def _attach(commands: Commands) -> str:
    command = await anext(commands, None)
    if command is None or not command.HasField("attach"):
        raise InvalidRequestError("the first command of a session must be attach")
    return command.attach.gateway_id


async def _write(
    session: GatewaySession, context: "grpc.aio.ServicerContext[worker_pb2.DecodeCommand, worker_pb2.DecodeStep]"
) -> None:
    while True:
        await context.write(await session.next_step())
