"""The gateway's session with the router: placements, and the promise to give each back once.

The session comes back after a router restart by itself, and counts the running requests again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from baton_pb.v1 import router_pb2, router_pb2_grpc
from cluster.gateway.outbox import Outbox
from cluster.service_level import ORDINARY, ServiceLevel, priority_to_pb
from common.errors import BatonError, WorkerLostError
from common.logs import log
from common.peers import tls_files
from common.rpc import open_channel
from common.status import error_from_pb, error_from_rpc, typed_rpc_errors

_LOG = logging.getLogger(__name__)
_OUTBOX_MAX = 16384
_STATUS_TIMEOUT_S = 2.0
_RETRY_FIRST_S = 0.02
_RETRY_MAX_S = 0.5
_RETRY_AFTER_S = 1.0
_ASKS_MAX = 4
"""Sessions that may break while one request waits for its placement."""


class _Question:
    """A placement that was asked for and not answered. Owned by the task that asks."""

    def __init__(self, deadline: float) -> None:
        self.answer: asyncio.Future[router_pb2.RouterReply] = asyncio.get_running_loop().create_future()
        self.limit = asyncio.timeout_at(deadline)


class _SessionLostError(Exception):
    """The session ended before its answer came."""


class Wanted(NamedTuple):
    """A request to place."""

    request_id: str
    num_tokens: int
    max_output_tokens: int
    hashes: list[bytes]
    excluded: frozenset[str]
    level: ServiceLevel = ORDINARY
    tenant: str = ""
    timeout_s: float | None = None
    """What is left of the deadline."""
    is_admitted: bool = False
    """It was placed before, and its worker failed."""


class Finished(NamedTuple):
    """How a request went that was answered to its end."""

    output_tokens: int
    transfer_exposed_s: float | None
    """None: its KV did not travel."""


class Reservation:
    """A placement, and this gateway's duty to release it."""

    def __init__(
        self, client: "RouterClient", reservation_id: str, wanted: Wanted, placement: router_pb2.WorkerPlacement
    ) -> None:
        self.reservation_id = reservation_id
        self.placement = placement
        self._client = client
        self._wanted = wanted
        self._is_prefilled = False
        self._is_released = False
        self._finished: Finished | None = None

    def first_token(self) -> bool:
        """Tell the router that prefill is over. Further calls do nothing.

        Returns:
            Whether this was the first one.
        """
        if self._is_prefilled or self._is_released:
            return False
        self._is_prefilled = True
        seen = router_pb2.FirstTokenSeen(reservation_id=self.reservation_id)
        self._client.send(router_pb2.RouterCommand(first_token=seen))
        return True

    def finished(self, output_tokens: int, transfer_exposed_s: float | None) -> None:
        """Note how a request went that was answered to its end; the router learns it at the release."""
        self._finished = Finished(output_tokens, transfer_exposed_s)

    def release(self) -> None:
        """Give it back. Further calls do nothing."""
        if not self._is_released:
            self._is_released = True
            self._client.released(self, self._finished)

    def hold(self) -> router_pb2.HoldRequest:
        """Return the message that makes a new router count it."""
        placement = self.placement
        return router_pb2.HoldRequest(
            reservation_id=self.reservation_id,
            decode_worker_id=placement.decode_worker_id,
            prefill_worker_id=placement.prefill.worker_id if placement.HasField("prefill") else None,
            num_tokens=self._wanted.num_tokens,
            max_output_tokens=self._wanted.max_output_tokens,
            is_prefilled=self._is_prefilled,
        )


class RouterClient:
    """Owned by the gateway's loop; `run` is its one task.

    away ──session open, attached, holds sent──► connected ──session broken──► away
                                                    │ place waits for this state, so long as `wait_s`
    """

    def __init__(
        self, address: str, gateway_id: str, wait_s: float, on_change: Callable[[bool], Awaitable[None]]
    ) -> None:
        """Connect when `run` runs.

        Args:
            address: host:port of the router.
            gateway_id: names this gateway to router and workers.
            wait_s: how long a request waits for a router that is away.
            on_change: called with whether the router is there, whenever that changes.
        """
        self.facts: router_pb2.ClusterFacts | None = None
        """What the workers agreed on when last heard of; None before any was ready."""
        self._address = address
        self._gateway_id = gateway_id
        self._wait_s = wait_s
        self._on_change = on_change
        self._channel = open_channel(address)
        self._stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(self._channel)
        self._connected = asyncio.Event()
        self._has_facts = asyncio.Event()
        self._outbox: Outbox[router_pb2.RouterCommand] | None = None
        self._call: Any = None  # grpc.aio's call types are generic in ways that cannot be named
        self._questions: dict[str, _Question] = {}
        self._live: dict[str, Reservation] = {}
        self._count = 0

    async def place(self, wanted: Wanted) -> Reservation:
        """Reserve workers for a request; the caller must release what it gets.

        Raises:
            WorkerLostError: no router within the time to wait, or no worker.
            BatonError: the router's own answer.
        """
        for _ in range(_ASKS_MAX):
            deadline = asyncio.get_running_loop().time() + self._wait_s
            await self._wait(self._connected, deadline, f"the router at {self._address} is away")
            try:
                return await self._ask(wanted, deadline)
            except _SessionLostError:
                continue  # it has forgotten the question, or its place in the queue; the next router is asked
        raise WorkerLostError(f"the router at {self._address} was lost {_ASKS_MAX} times", _RETRY_AFTER_S)

    async def known_facts(self) -> router_pb2.ClusterFacts:
        """Return what the workers agree on; wait for the first one to be ready.

        Raises:
            WorkerLostError: no worker was ready in time.
        """
        deadline = asyncio.get_running_loop().time() + self._wait_s
        await self._wait(self._has_facts, deadline, "no worker has been ready yet")
        assert self.facts is not None
        return self.facts

    async def status(self) -> router_pb2.RouterStatus:
        """Return what the router knows.

        Raises:
            WorkerLostError: it is away.
        """
        with typed_rpc_errors():
            return await self._stub.GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=_STATUS_TIMEOUT_S)

    async def explain(self, request_ids: Sequence[str], tenant: str | None = None) -> router_pb2.ExplainReply:
        """Return why requests went where they did; with a tenant, only those of that tenant.

        Args:
            request_ids: at least one; those that the router does not remember are left out of the answer.
            tenant: whose.

        Raises:
            WorkerLostError: the router is away.
        """
        first, *further = request_ids
        with typed_rpc_errors():
            request = router_pb2.ExplainRequest(request_id=first, tenant=tenant, further_request_ids=further)
            return await self._stub.Explain(request, timeout=_STATUS_TIMEOUT_S)

    async def run(self) -> None:
        """Keep the session open until cancelled. There is no limit to the tries: nothing works without a router."""
        pause_s = _RETRY_FIRST_S
        try:
            while True:
                try:
                    await self._open()
                    pause_s = _RETRY_FIRST_S
                    await self._read()
                except grpc.aio.AioRpcError as error:
                    reason = error_from_rpc(error).message
                else:
                    reason = "it ended the session"
                await self._lose(reason)
                await self._renew_channel()
                await asyncio.sleep(pause_s)  # backoff: a connection that fails cannot be waited for
                pause_s = min(2 * pause_s, _RETRY_MAX_S)
        finally:
            self._disconnect()
            if self._call is not None:
                self._call.cancel()
            await self._channel.close(None)

    def send(self, command: router_pb2.RouterCommand) -> None:
        """Send a command, if there is a session; the next session begins with all that is still true."""
        if self._outbox is None or not self._connected.is_set():
            return
        if not self._outbox.put(command):
            # A router that does not read is as good as gone: its session ends, and with it all reservations on it.
            self._call.cancel()

    def released(self, reservation: Reservation, finished: Finished | None) -> None:
        """Give a reservation back; it calls this itself."""
        del self._live[reservation.reservation_id]
        self._send_release(reservation.reservation_id, finished)

    @property
    def num_reservations(self) -> int:
        """Reservations not yet released."""
        return len(self._live)

    async def _ask(self, wanted: Wanted, deadline: float) -> Reservation:
        self._count += 1
        reservation_id = f"{self._gateway_id}.{self._count}"
        question = self._questions[reservation_id] = _Question(deadline)
        try:
            self.send(router_pb2.RouterCommand(place=_question(reservation_id, wanted)))
            async with question.limit:
                reply = await question.answer
        except BaseException as error:
            # Whoever leaves without an answer gives back what may have been reserved meanwhile.
            self._send_release(reservation_id)
            if isinstance(error, TimeoutError):
                raise WorkerLostError(f"the router did not answer for {self._wait_s:g} s", _RETRY_AFTER_S) from error
            raise
        finally:
            del self._questions[reservation_id]
        if reply.HasField("error"):
            raise error_from_pb(reply.error)
        reservation = Reservation(self, reservation_id, wanted, reply.placement)
        self._live[reservation_id] = reservation
        return reservation

    def _send_release(self, reservation_id: str, finished: Finished | None = None) -> None:
        release = router_pb2.ReleaseRequest(
            reservation_id=reservation_id,
            output_tokens=None if finished is None else finished.output_tokens,
            transfer_exposed_s=None if finished is None else finished.transfer_exposed_s,
        )
        self.send(router_pb2.RouterCommand(release=release))

    async def _wait(self, event: asyncio.Event, deadline: float, trouble: str) -> None:
        if event.is_set():  # as nearly always; a limit to a wait that is none would cost 10 us
            return
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError as error:
            raise WorkerLostError(f"{trouble}; waited {self._wait_s:g} s", _RETRY_AFTER_S) from error

    async def _open(self) -> None:
        attach = router_pb2.RouterCommand(attach=router_pb2.RouterAttach(gateway_id=self._gateway_id))
        self._outbox = Outbox(_OUTBOX_MAX, attach, _together)
        self._call = self._stub.Session(self._outbox, wait_for_ready=True)
        await self._call.initial_metadata()  # the router sends it when it has attached us
        if self._call.done():
            return  # the first read will say why
        self._connected.set()
        for reservation in self._live.values():
            self.send(router_pb2.RouterCommand(hold=reservation.hold()))
        log(_LOG, logging.INFO, "router connected", address=self._address, held=len(self._live))
        await self._on_change(True)

    async def _read(self) -> None:
        async for reply in self._call:
            for one in reply.batch.replies if reply.HasField("batch") else (reply,):
                self._take(one)

    def _take(self, reply: router_pb2.RouterReply) -> None:
        if reply.HasField("facts"):
            self.facts = reply.facts
            self._has_facts.set()
        elif (question := self._questions.get(reply.reservation_id)) is not None and not question.answer.done():
            if reply.HasField("queued"):
                # It waits for room, and will be answered: the limit for a router that is away does not count now.
                patience_s = reply.queued.wait_max_s + self._wait_s
                question.limit.reschedule(asyncio.get_running_loop().time() + patience_s)
            else:
                question.answer.set_result(reply)

    async def _renew_channel(self) -> None:
        """Connect anew where connections are encrypted: a channel shows for ever the certificate it began with."""
        if tls_files() is not None:
            await self._channel.close(None)
            self._channel = open_channel(self._address)
            self._stub = router_pb2_grpc.RouterStub(self._channel)

    async def _lose(self, reason: str) -> None:
        was_connected = self._connected.is_set()
        self._disconnect()
        if was_connected:
            log(_LOG, logging.WARNING, f"router lost: {reason}", address=self._address)
            await self._on_change(False)

    def _disconnect(self) -> None:
        self._connected.clear()
        if self._outbox is not None:
            self._outbox.close()
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(_SessionLostError())


def _together(commands: Sequence[router_pb2.RouterCommand]) -> router_pb2.RouterCommand:
    return router_pb2.RouterCommand(batch=router_pb2.RouterCommandBatch(commands=commands))


def _question(reservation_id: str, wanted: Wanted) -> router_pb2.PlaceRequest:
    return router_pb2.PlaceRequest(
        reservation_id=reservation_id,
        request_id=wanted.request_id,
        num_tokens=wanted.num_tokens,
        max_output_tokens=wanted.max_output_tokens,
        hashes=wanted.hashes,
        excluded_worker_ids=sorted(wanted.excluded),
        tenant=wanted.tenant,
        priority=priority_to_pb(wanted.level.priority),
        ttft_target_s=wanted.level.ttft_target_s,
        tpot_target_s=wanted.level.tpot_target_s,
        timeout_s=wanted.timeout_s,
        is_admitted=wanted.is_admitted,
    )


def away(error: BatonError) -> router_pb2.RouterStatus:
    """Return the status of a router that cannot be asked."""
    return router_pb2.RouterStatus(policy=f"unknown: {error.message}", counters={"unreachable": 1})
