"""Operators' calls: the state of the whole cluster, as this gateway and its router see it."""

# ruff: noqa: N802 - the protocol's names

from typing import Any

import grpc
import grpc.aio

from baton_pb.v1 import admin_pb2, admin_pb2_grpc, router_pb2
from cluster.gateway.choices import choice_id
from cluster.gateway.counts import Counts
from cluster.gateway.degraded import degraded
from cluster.gateway.inference import InferenceService
from cluster.gateway.router_client import RouterClient, away
from common.clock import Clock
from common.errors import BatonError, NotFoundError
from common.status import rpc_errors_to_status

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(admin_pb2_grpc.AdminServicer):
    """GetStatus and Explain."""

    def __init__(
        self,
        gateway_id: str,
        address: str,
        counts: Counts,
        router: RouterClient,
        inference: InferenceService,
        clock: Clock,
        choices_max: int,
    ) -> None:
        self._gateway_id = gateway_id
        self._address = address
        self._counts = counts
        self._router = router
        self._inference = inference
        self._clock = clock
        self._started_s = clock.now()
        self._choices_max = choices_max

    async def Explain(self, request: router_pb2.ExplainRequest, context: _Context) -> router_pb2.ExplainReply:
        """Say why a request went where it did."""
        async with rpc_errors_to_status(context):
            request_id = request.request_id
            choices = [choice_id(request_id, number) for number in range(self._choices_max)]
            reply = await self._router.explain([request_id, *choices])
            if not reply.placements:
                raise NotFoundError(f"the router does not remember a placement of request {request_id!r}")
            own = [placement for placement in reply.placements if placement.request_id == request_id]
            return router_pb2.ExplainReply(placements=own) if own else reply

    async def GetStatus(
        self,
        request: admin_pb2.GetStatusRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> admin_pb2.ClusterStatus:
        """Say how the cluster fares; a router that is away leaves its part empty but for `unreachable`."""
        try:
            router = await self._router.status()
        except BatonError as error:
            router = away(error)
        counts = self._counts
        used = {stats.transport for worker in router.workers for stats in worker.load.transfer_stats}
        return admin_pb2.ClusterStatus(
            workers=router.workers,
            router=router,
            gateway=admin_pb2.GatewayStatus(
                gateway_id=self._gateway_id,
                address=self._address,
                running_requests=counts.running,
                queued_requests=counts.queued,
                requests_total=counts.requests_total,
                errors_total=counts.errors,
                counters=counts.counters,
            ),
            model=self._inference.model(),
            uptime_s=self._clock.now() - self._started_s,
            transports=sorted((used | counts.transports) - {"", "local"}),
            degraded=degraded(router),
        )
