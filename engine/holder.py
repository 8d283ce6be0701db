"""Blocks for other workers: one that holds a prefix pushes it to one that asks."""

import asyncio
from typing import Protocol

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.errors import BatonError, CancelledRequestError, InvalidRequestError, NotFoundError, OverloadedError
from common.status import rpc_errors_to_status
from engine.engine import Engine
from engine.rpc_server import deadline
from engine.step_runner import StepRunner
from kvtransfer.interface import Endpoint, Push, PushReport

FETCHES_MAX = 16
"""Pushes for other workers at a time, beyond which they are refused: they take memory bandwidth from the model."""


class HoldingLoop(Protocol):
    """The worker's loop, as the holder sees it."""

    runner: StepRunner

    def pool_changed(self) -> None:
        """Blocks came back that others may wait for."""
        ...


class HolderService(worker_pb2_grpc.HolderServicer):
    """`Fetch` of one worker. The blocks are held until nobody reads them, however the call ends.

    Owned by the worker's asyncio loop.
    """

    def __init__(self, engine: Engine, endpoint: Endpoint, loop: HoldingLoop) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._loop = loop
        self._num_running = 0

    async def Fetch(  # noqa: N802  # the protocol's name
        self,
        request: worker_pb2.FetchRequest,
        context: "grpc.aio.ServicerContext[worker_pb2.FetchRequest, worker_pb2.FetchReply]",
    ) -> worker_pb2.FetchReply:
        """Push the blocks, or say at once why not."""
        async with rpc_errors_to_status(context), deadline(request.timeout_s):
            report = await self._push(request)
            return worker_pb2.FetchReply(transport=report.transport, num_bytes=report.num_bytes)

    async def _push(self, request: worker_pb2.FetchRequest) -> PushReport:
        blocks = self._take(request)
        outcome: asyncio.Future[PushReport] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(lambda future: future.cancelled() or future.exception())  # it may end unwatched
        # A task of its own: the caller may leave, and the blocks must stay until the push is quiet.
        work = self._loop.runner.spawn(self._run(request, blocks, outcome), "fetch")
        try:
            return await asyncio.shield(outcome)
        finally:
            if not outcome.done():  # else it is on its way out, where nothing may cancel it
                work.cancel()

    def _take(self, request: worker_pb2.FetchRequest) -> list[int]:
        """Hold the blocks asked for; `_run` lets go of them."""
        if self._num_running >= FETCHES_MAX:
            raise OverloadedError(f"{self._num_running} fetches run already, the limit of this worker")
        num_hashes, num_landing = len(request.hashes), len(request.ticket.block_ids)
        if num_hashes != num_landing:
            raise InvalidRequestError(f"the ticket has {num_landing} blocks for {num_hashes} hashes")
        blocks = self._engine.pool.match(request.hashes)
        if len(blocks) < num_hashes:
            self._engine.pool.release(blocks)
            raise NotFoundError(f"{len(blocks)} of {num_hashes} blocks are here")
        self._num_running += 1
        return blocks

    async def _run(
        self, request: worker_pb2.FetchRequest, blocks: list[int], outcome: "asyncio.Future[PushReport]"
    ) -> None:
        push: Push | None = None
        try:
            push = await self._endpoint.open_push(request.ticket, blocks)
            outcome.set_result(await push.finish())
        except BatonError as error:
            outcome.set_exception(error)
        finally:
            if not outcome.done():
                outcome.set_exception(CancelledRequestError("the caller left"))
            if push is not None:
                await push.abort("the holder gave up")  # nothing, after it was confirmed
            self._num_running -= 1
            self._engine.pool.release(blocks)
            self._loop.pool_changed()
