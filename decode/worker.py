"""A decode worker: one engine, one endpoint, one loop, and the gRPC service that gateways keep a stream to."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.clock import Clock, MonotonicClock
from common.config import DecodeConfig, EngineConfig, TransferConfig
from common.errors import InvalidRequestError
from common.status import rpc_errors_to_status
from decode.loop import DecodeLoop
from decode.session import GatewaySession
from engine.engine import Engine
from engine.placement import Placement
from engine.prefix_loader import PrefixLoader
from engine.service import Identity
from engine.worker import Worker, start_worker
from kvtransfer.interface import Endpoint

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
            self._take(session, command)

    def _take(self, session: GatewaySession, command: worker_pb2.DecodeCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._loop.start(session, command.start)
            case "cancel":
                cancel = command.cancel
                self._loop.cancel(session, cancel.request_id, cancel.wants_summary)
            case "batch":
                for one in command.batch.commands:
                    self._take(session, one)
            case "attach":
                raise InvalidRequestError(f"gateway {session.gateway_id} is attached already")
            case None:
                raise InvalidRequestError("a command that this worker does not know")


class DecodeWorker(Worker):
    """Everything of one decode worker."""

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
        """See Worker. `is_colocated`: its role is `both`."""
        loader = PrefixLoader(engine, endpoint, worker_id)
        self.loop = DecodeLoop(worker_id, engine, endpoint, loader, config, clock or MonotonicClock())
        role = worker_pb2.WORKER_ROLE_BOTH if is_colocated else worker_pb2.WORKER_ROLE_DECODE
        limits = worker_pb2.WorkerLimits(
            running_max=config.running_max,
            waiting_max=config.waiting_max,
            token_budget=config.token_budget,
            itl_target_s=config.itl_target_s or 0.0,
        )
        identity = Identity(worker_id, role, heartbeat_s, limits)
        super().__init__(identity, host, engine, endpoint, loader, self.loop)
        worker_pb2_grpc.add_DecodeServicer_to_server(DecodeService(self.loop), self.rpc.server)

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
        return await start_worker(
            lambda loaded, endpoint: cls(worker_id, host, loaded, endpoint, role, heartbeat_s, is_colocated),
            worker_id,
            host,
            model_dir,
            model_id,
            engine,
            transfer,
            Placement.of(worker_id, role.cores, engine.threads, 0),
        )


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
