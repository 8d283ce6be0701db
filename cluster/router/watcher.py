"""Follows one worker: handshake, then its reports until the connection breaks or falls silent, then again."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from cluster.router.messages import facts_from_pb, load_from_pb, role_from_pb, snapshot_from_pb, tier_from_pb
from cluster.router.router import Router
from cluster.router.worker import WorkerInfo
from common.chain_hash import probe
from common.errors import BatonError, MismatchError, WorkerLostError
from common.logs import log
from common.rpc import open_channel
from common.status import error_from_rpc

_LOG = logging.getLogger(__name__)
_HANDSHAKE_TIMEOUT_S = 2.0
_MISSES = 3
"""Heartbeats that may fail to come before a worker is lost."""
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 1.0


class _Gap(Exception):  # noqa: N818 - no error: a reason to watch anew
    """The numbers do not follow each other: a snapshot is needed."""


class Watcher:
    """Tells the router's core about one worker. Runs on the router's loop until cancelled.

    There is no limit to the tries: the worker stays in the list until the supervisor takes it out.
    """

    def __init__(self, info: WorkerInfo, router: Router, heartbeat_s: float, on_change: Callable[[], None]) -> None:
        self.load: worker_pb2.LoadReport | None = None
        """The last report of a worker that is not lost."""
        self.handshake: worker_pb2.HandshakeReply | None = None
        self.was_tried = False
        """Whether it is known how the worker fares: it has reported, or failed to."""
        self._info = info
        self._router = router
        self._heartbeat_s = heartbeat_s
        self._on_change = on_change
        self._pause_s = _RETRY_FIRST_S
        self._said = ""

    async def run(self) -> None:
        """Follow the worker until cancelled."""
        while True:
            try:
                async with open_channel(self._info.address) as channel:
                    await self._follow(worker_pb2_grpc.WorkerStub(channel))
            except MismatchError as error:
                self._router.refuse(self._info.worker_id, error.message)
                self._say(logging.ERROR, f"refused: {error.message}")
            except BatonError as error:
                self._router.lose(self._info.worker_id, error.message)
                self._say(logging.WARNING, f"lost: {error.message}")
            self.load = self.handshake = None
            self.was_tried = True
            self._on_change()
            await asyncio.sleep(self._pause_s)  # backoff, not polling: a connection that fails cannot be waited for
            self._pause_s = min(2 * self._pause_s, _RETRY_MAX_S)

    async def _follow(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
        try:
            handshake = await stub.Handshake(worker_pb2.HandshakeRequest(), timeout=_HANDSHAKE_TIMEOUT_S)
            self._check(handshake)
            self._router.welcome(self._info.worker_id, facts_from_pb(handshake))
            self.handshake = handshake
            while True:
                try:
                    await self._watch(stub)
                except _Gap as gap:
                    self._router.counters["event_gaps_total"] += 1
                    log(_LOG, logging.WARNING, f"asking for a snapshot: {gap}", worker_id=self._info.worker_id)
        except grpc.aio.AioRpcError as error:
            found = error_from_rpc(error)
            # Whatever code it has, the worker does not report.
            raise WorkerLostError(f"{self._info.address}: {found.message}") from error

    def _check(self, handshake: worker_pb2.HandshakeReply) -> None:
        """Refuse a worker that is not the announced one, or hashes in its own way."""
        info, block_tokens = self._info, handshake.layout.block_tokens
        if handshake.worker_id != info.worker_id:
            raise MismatchError(f"{info.address} is worker {handshake.worker_id!r}, not {info.worker_id!r}")
        if role_from_pb(handshake.role) is not info.role:
            role = worker_pb2.WorkerRole.Name(handshake.role)
            raise MismatchError(f"{info.worker_id} has role {role}, not {info.role.value}")
        if block_tokens == 0 or handshake.hash_probe != probe(block_tokens):
            raise MismatchError(
                f"probe hash of {info.worker_id} is {handshake.hash_probe.hex() or 'missing'} for blocks of "
                f"{block_tokens} tokens, not as computed here: it would name prefixes in its own way"
            )

    async def _watch(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
        call = stub.Watch(worker_pb2.WatchRequest(heartbeat_s=self._heartbeat_s))
        number = 0
        try:
            while True:
                try:
                    async with asyncio.timeout(_MISSES * self._heartbeat_s):
                        report = await call.read()
                except TimeoutError as error:
                    silence_s = _MISSES * self._heartbeat_s
                    raise WorkerLostError(f"no report for {silence_s:g} s") from error
                if not isinstance(report, worker_pb2.WorkerReport):
                    raise WorkerLostError("it ended its reports")
                number += 1
                if report.number != number:
                    raise _Gap(f"report {report.number} came where {number} was due")
                self._apply(report)
        finally:
            call.cancel()

    def _apply(self, report: worker_pb2.WorkerReport) -> None:
        worker_id, index = self._info.worker_id, self._router.index
        if report.HasField("snapshot"):
            index.replace(worker_id, snapshot_from_pb(report.snapshot))
        for event in report.events:
            if not index.apply(worker_id, event.number, event.stored, event.hashes, tier_from_pb(event.tier)):
                raise _Gap(f"cache event {event.number} does not follow the one before it")
        is_first, self.was_tried = self.load is None, True
        self.load = report.load
        self._router.report(worker_id, load_from_pb(report.load))
        if is_first:
            self._pause_s, self._said = _RETRY_FIRST_S, ""
            log(_LOG, logging.INFO, "ready", worker_id=worker_id, address=self._info.address)
        self._on_change()

    def _say(self, level: int, message: str) -> None:
        """Write a line, unless it is the one written last: a dead worker is tried again and again."""
        if message != self._said:
            self._said = message
            log(_LOG, level, message, worker_id=self._info.worker_id, address=self._info.address)
