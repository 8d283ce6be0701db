"""The router as a gRPC service: gateways' sessions in, the workers' reports in, placements out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from random import Random
from typing import Any, Self

import grpc
import grpc.aio

from baton_pb.v1 import router_pb2, router_pb2_grpc
from cluster.router.explain import explanations_to_pb
from cluster.router.front import Front
from cluster.router.messages import absent_from_pb, absent_to_pb, cluster_facts, info_from_pb, worker_to_pb
from cluster.router.policies.registry import policy_named
from cluster.router.router import Router
from cluster.router.session import GatewaySession
from cluster.router.step_model import StepModel
from cluster.router.watcher import Watcher
from common.config import RouterConfig, StepConfig
from common.errors import InvalidRequestError
from common.logs import log
from common.rpc import Health, bind, make_server
from common.status import rpc_errors_to_status

_LOG = logging.getLogger(__name__)
_STOP_GRACE_S = 0.2
_SETTLE_S = 2.0
"""How long a router that has just started lets gateways wait until it knows its workers."""

# N802: the protocol's names.
# ruff: noqa: N802

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServicer):
    """Owns the core, its watchers and its sessions; all on one loop."""

    def __init__(self, router: Router, config: RouterConfig, heartbeat_s: float) -> None:
        self._router = router
        self._front = Front(router, config, self._arm)
        self._alarm: asyncio.TimerHandle | None = None
        """For the first of those that wait whose time is over."""
        self._num_sessions = 0
        self._heartbeat_s = heartbeat_s
        self._sessions: set[GatewaySession] = set()
        self._watchers: dict[str, Watcher] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told: router_pb2.ClusterFacts | None = None
        self._settled = asyncio.Event()
        """Set once the list of workers has come and each of them has been tried."""

    # The stubs know generators only; with `context.write` the end of the call is seen here, in `finally`.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[router_pb2.RouterCommand], context: _Context
    ) -> None:
        """Serve one gateway until it leaves, then release what it reserved."""
        async with rpc_errors_to_status(context):
            gateway_id = await _attach(request_iterator)
            await self._settle()
            await context.send_initial_metadata(())  # tells the gateway that it is attached
            self._num_sessions += 1
            session = GatewaySession(self._front, self._num_sessions)
            self._sessions.add(session)
            log(_LOG, logging.INFO, "gateway attached", gateway_id=gateway_id)
            reader = asyncio.create_task(_read(session, request_iterator))
            writer = asyncio.create_task(_write(session, context))
            try:
                if self._told is not None:
                    session.send(router_pb2.RouterReply(facts=self._told))
                either: list[asyncio.Future[None]] = [reader, writer, session.broken]
                done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    ended.result()
            finally:
                self._sessions.discard(session)
                session.close()
                reader.cancel()
                writer.cancel()
                log(_LOG, logging.INFO, "gateway left", gateway_id=gateway_id)

    async def SetWorkers(self, request: router_pb2.SetWorkersRequest, context: _Context) -> router_pb2.SetWorkersReply:
        """Take the list of workers."""
        async with rpc_errors_to_status(context):
            await self.set_workers(request.workers, request.absent)
            return router_pb2.SetWorkersReply()

    async def GetRouterStatus(
        self,
        request: router_pb2.GetRouterStatusRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> router_pb2.RouterStatus:
        """Say what is known."""
        return self.status()

    async def Explain(
        self,
        request: router_pb2.ExplainRequest,
        context: _Context,  # noqa: ARG002
    ) -> router_pb2.ExplainReply:
        """Say why requests went where they did."""
        tenant = request.tenant if request.HasField("tenant") else None
        explanations = self._router.explanations
        found = [
            each
            for request_id in (request.request_id, *request.further_request_ids)
            for each in explanations.of(request_id, tenant)
        ]
        return explanations_to_pb(found, self._router.policy.name)

    async def set_workers(
        self, workers: Iterable[router_pb2.WorkerAddress], absent: Iterable[router_pb2.WorkerAddress] = ()
    ) -> None:
        """Follow these workers and forget all others; `absent` ones should exist too, and are nowhere now.

        Raises:
            InvalidRequestError: an entry is incomplete; nothing was changed.
        """
        new, left = self._router.set_workers(
            [info_from_pb(worker) for worker in workers], [absent_from_pb(worker) for worker in absent]
        )
        ended = [self._tasks.pop(worker_id) for worker_id in left]
        for worker_id in left:
            del self._watchers[worker_id]
        for task in ended:
            task.cancel()
        for info in new:
            watcher = Watcher(info, self._router, self._heartbeat_s, self._changed)
            self._watchers[info.worker_id] = watcher
            self._tasks[info.worker_id] = asyncio.create_task(watcher.run(), name=f"watch {info.worker_id}")
        self._changed()
        await asyncio.gather(*ended, return_exceptions=True)

    def status(self) -> router_pb2.RouterStatus:
        """Return what is known of workers and placements."""
        router = self._router
        status = router_pb2.RouterStatus(
            policy=router.policy.name,
            reservations=router.num_reservations,
            indexed_blocks=router.index.num_blocks,
            placements_total=router.placements_total,
            counters=router.counters,
            queued=self._front.num_waiting,
        )
        for worker in router.workers:
            watcher = self._watchers[worker.info.worker_id]
            is_silent = router.is_silent(worker.info.worker_id)
            status.workers.append(worker_to_pb(worker, watcher.load, watcher.handshake, is_silent))
        status.workers.extend(map(absent_to_pb, router.workers.absent))
        return status

    async def close(self) -> None:
        """Stop following workers."""
        await self.set_workers([])
        if self._alarm is not None:
            self._alarm.cancel()

    async def _settle(self) -> None:
        """Wait until a placement has a chance: after a restart the first requests must not find nobody."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await self._settled.wait()

    def _changed(self) -> None:
        """Take note that a worker's state or load, or the list of them, has changed."""
        if all(watcher.was_tried for watcher in self._watchers.values()):
            self._settled.set()
        self._tell_facts()
        self._front.pump()

    def _arm(self) -> None:
        """Wake up when the first of those that wait has waited long enough."""
        if self._alarm is not None:
            self._alarm.cancel()
        end_s = self._front.next_end_s
        if end_s is None:
            self._alarm = None
            return
        pause_s = max(0.0, end_s - self._router.now())
        self._alarm = asyncio.get_running_loop().call_later(pause_s, self._front.expire)

    def _tell_facts(self) -> None:
        """Tell the gateways when what the workers agree on has changed. While nobody is left, the old facts stand."""
        facts = cluster_facts(self._router)
        if facts is None or facts.context_tokens == 0 or facts == self._told:
            return
        self._told = facts
        for session in self._sessions:
            session.send(router_pb2.RouterReply(facts=facts))


async def _attach(commands: AsyncIterator[router_pb2.RouterCommand]) -> str:
    first = await anext(aiter(commands), None)
    if first is None or not first.attach.gateway_id:
        raise InvalidRequestError("the first command must attach with a gateway_id")
    return first.attach.gateway_id


async def _read(session: GatewaySession, commands: AsyncIterator[router_pb2.RouterCommand]) -> None:
    async for command in commands:
        session.take(command)


async def _write(session: GatewaySession, context: _Context) -> None:
    while True:
        await context.write(await session.next_reply())


class RouterServer:
    """A router that serves. Create it with `start`."""

    def __init__(self, server: grpc.aio.Server, service: RouterService, address: str) -> None:
        self.address = address
        """host:port"""
        self._server = server
        self._service = service

    @classmethod
    async def start(cls, host: str, port: int, config: RouterConfig, heartbeat_s: float) -> Self:
        """Serve placements on host:port (0: any free port).

        Args:
            host: address to listen on.
            port: port to listen on.
            config: the policy.
            heartbeat_s: workers report at least so often; one that is silent for three times as long is lost.

        Raises:
            ConfigError: no such policy, or the port cannot be had.
        """
        policy = policy_named(config.policy)
        step = _step_model(config.step)
        router = Router(policy, Random(), ahead_s=config.prefill_ahead_s, step=step, falls_back=config.prefill_fallback)
        service = RouterService(router, config, heartbeat_s)
        server = make_server()
        router_pb2_grpc.add_RouterServicer_to_server(service, server)
        health = Health(server)
        address = bind(server, host, port)
        await server.start()
        await health.set_serving(True, ["", router_pb2.DESCRIPTOR.services_by_name["Router"].full_name])
        log(_LOG, logging.INFO, "router serves", address=address, policy=config.policy)
        return cls(server, service, address)

    async def set_workers(
        self, workers: Iterable[router_pb2.WorkerAddress], absent: Iterable[router_pb2.WorkerAddress] = ()
    ) -> None:
        """Do what the call SetWorkers does, from within this process."""
        await self._service.set_workers(workers, absent)

    def status(self) -> router_pb2.RouterStatus:
        """Return what the call GetRouterStatus returns."""
        return self._service.status()

    async def stop(self) -> None:
        """End all sessions and stop following workers. Gateways come back to the next router by themselves."""
        await self._server.stop(_STOP_GRACE_S)
        await self._service.close()


def _step_model(step: StepConfig) -> StepModel:
    return StepModel(step.base_s, step.token_s, step.attention_s, step.sequence_s, step.context_s)
