"""Tells the router which workers exist, until it has confirmed the newest list."""

import asyncio
import logging

import grpc
import grpc.aio

from baton_pb.v1 import router_pb2, router_pb2_grpc, worker_pb2
from cluster.supervisor.fleet import Member, Place, Publish, Role
from common.rpc import open_channel

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 2.0
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 2.0

_ROLES = {
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    Role.BOTH: worker_pb2.WORKER_ROLE_BOTH,
}


class Publisher:
    """Holds the newest worker list and whether the router has it. Owned by the supervisor's loop.

    There is no limit to the tries: a list stays right until a newer one replaces it, and the router comes back at the
    same address.
    """

    def __init__(self) -> None:
        self._newest: Publish | None = None
        self._confirmed: Publish | None = None
        self._changed = asyncio.Event()
        self._done = asyncio.Event()

    def publish(self, publish: Publish) -> None:
        """Replace the list. An equal list is sent again: the router may have forgotten it."""
        self._newest, self._confirmed = publish, None
        self._changed.set()
        self._done.clear()

    async def confirmed(self) -> Publish:
        """Wait until the router has the newest list, and return it."""
        await self._done.wait()
        assert self._confirmed is not None
        return self._confirmed

    async def run(self) -> None:
        """Send lists until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            publish = self._newest
            assert publish is not None
            async with open_channel(publish.router_address) as channel:
                await self._send(router_pb2_grpc.RouterStub(channel), publish)

    async def _send(self, stub: "router_pb2_grpc.RouterAsyncStub", publish: Publish) -> None:
        request = router_pb2.SetWorkersRequest(
            workers=[_encode(member, place) for member, place in publish.workers],
            absent=[router_pb2.WorkerAddress(worker_id=one.name, role=_ROLES[one.role]) for one in publish.absent],
        )
        pause = _RETRY_FIRST_S
        while not self._changed.is_set():
            try:
                await stub.SetWorkers(request, timeout=_TIMEOUT_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                _LOG.warning("the router did not take the worker list, trying again: %s", error.details())
                await self._pause(pause)
                pause = min(2 * pause, _RETRY_MAX_S)
                continue
            if publish is self._newest:
                self._confirmed = publish
                self._done.set()
            return

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return


def _encode(member: Member, place: Place) -> router_pb2.WorkerAddress:
    return router_pb2.WorkerAddress(
        worker_id=member.name, address=place.address, role=_ROLES[member.role], node=place.node
    )
