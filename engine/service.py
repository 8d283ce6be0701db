"""What every worker offers besides its own service: who it is, what it holds, how busy it is, how to drain it."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.chain_hash import probe
from common.status import rpc_errors_to_status
from engine.cache_log import CacheChange, CacheTier
from engine.engine import Engine
from engine.worker_times import REPORT_INTERVAL_S
from kvtransfer.interface import Endpoint

HEARTBEAT_MIN_S = 0.05
PENDING_HASHES_MAX = 1 << 16
"""Unsent hashes of one Watch beyond which they are dropped and a snapshot follows."""


_TIERS = {
    CacheTier.POOL: worker_pb2.CACHE_TIER_POOL,
    CacheTier.HOST: worker_pb2.CACHE_TIER_HOST,
    CacheTier.DISK: worker_pb2.CACHE_TIER_DISK,
}


class LoopLoad(NamedTuple):
    """A loop's own view of its load; see LoadReport."""

    queued_tokens: int
    waiting_sequences: int
    running_sequences: int
    is_draining: bool
    counters: Mapping[str, int]
    steps: worker_pb2.StepTotals | None = None
    fetches: worker_pb2.FetchTotals | None = None


class ServedLoop(Protocol):
    """What the service needs of a worker's loop."""

    def load(self) -> LoopLoad:
        """Return the load of this moment."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `load` or the pool may have changed."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, wait for the running ones; return how many are left after `timeout_s`."""
        ...


class Identity(NamedTuple):
    """Who a worker is, besides what its engine and endpoint say."""

    worker_id: str
    role: worker_pb2.WorkerRole.ValueType
    heartbeat_s: float
    limits: worker_pb2.WorkerLimits | None = None


@dataclass(slots=True, eq=False)
class _Watcher:
    """What one Watch stream has not been told yet."""

    changed: asyncio.Event
    needs_snapshot: bool = True
    changes: list[CacheChange] | None = None
    num_hashes: int = 0

    def take(self) -> list[CacheChange]:
        changes, self.changes, self.num_hashes = self.changes or [], None, 0
        return changes

    def add(self, change: CacheChange) -> None:
        if self.needs_snapshot:
            return
        self.num_hashes += len(change.hashes)
        if self.num_hashes > PENDING_HASHES_MAX:
            self.resync()
            return
        self.changes = [*(self.changes or []), change]

    def resync(self) -> None:
        self.take()
        self.needs_snapshot = True


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Handshake, Watch and Drain of one worker. Owned by the worker's asyncio loop.

    Cache changes are drained from the pool here and nowhere else, and handed to every watcher.
    """

    def __init__(self, identity: Identity, engine: Engine, endpoint: Endpoint, loop: ServedLoop) -> None:
        self.generation = secrets.randbits(64)
        self._identity = identity
        self._engine = engine
        self._endpoint = endpoint
        self._loop = loop
        self._watchers: set[_Watcher] = set()
        self._last_number = 0
        loop.on_change(self._changed)

    async def Handshake(  # noqa: N802  # the protocol's name
        self,
        request: worker_pb2.HandshakeRequest,  # noqa: ARG002
        context: "grpc.aio.ServicerContext[worker_pb2.HandshakeRequest, worker_pb2.HandshakeReply]",  # noqa: ARG002
    ) -> worker_pb2.HandshakeReply:
        """Say who this is."""
        return self.handshake()

    # The stubs know generators only; with `context.write` the end of the call is seen here, in `finally`.
    async def Watch(  # type: ignore[override]  # noqa: N802
        self,
        request: worker_pb2.WatchRequest,
        context: "grpc.aio.ServicerContext[worker_pb2.WatchRequest, worker_pb2.WorkerReport]",
    ) -> None:
        """Report until the caller leaves: at each change, and at least every `heartbeat_s`."""
        asked_s = request.heartbeat_s or self._identity.heartbeat_s
        heartbeat_s = max(HEARTBEAT_MIN_S, min(asked_s, self._identity.heartbeat_s))
        watcher = _Watcher(asyncio.Event())
        self._watchers.add(watcher)
        number = 0
        try:
            while True:
                number += 1
                await context.write(self._report(watcher, number))
                await asyncio.sleep(min(REPORT_INTERVAL_S, heartbeat_s / 2))  # pace: what changes now goes together
                try:
                    async with asyncio.timeout(heartbeat_s):
                        await watcher.changed.wait()
                except TimeoutError:
                    continue  # nothing changed: the report is the heartbeat
        finally:
            self._watchers.discard(watcher)

    async def Drain(  # noqa: N802
        self,
        request: worker_pb2.DrainRequest,
        context: "grpc.aio.ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainReply]",
    ) -> worker_pb2.DrainReply:
        """Take no new requests, and wait for the running ones."""
        async with rpc_errors_to_status(context):
            return worker_pb2.DrainReply(unfinished=await self._loop.drain(request.timeout_s))

    def handshake(self) -> worker_pb2.HandshakeReply:
        """Return what is true of this worker."""
        engine, layout = self._engine, self._engine.layout
        return worker_pb2.HandshakeReply(
            worker_id=self._identity.worker_id,
            role=self._identity.role,
            generation=self.generation,
            model_id=layout.model_id,
            layout=layout.to_pb(),
            hash_probe=probe(layout.block_tokens),
            num_blocks=engine.pool.num_blocks,
            context_tokens=engine.context_tokens,
            backend=engine.backend,
            transfer=self._endpoint.address,
            limits=self._identity.limits,
            block_bytes=layout.block_bytes,
            slow_paths=[*engine.slow_paths, *self._endpoint.slow_paths],
        )

    def load(self) -> worker_pb2.LoadReport:
        """Return the load of this moment."""
        load, pool = self._loop.load(), self._engine.pool
        return worker_pb2.LoadReport(
            blocks_free=pool.num_free,
            blocks_used=pool.num_used,
            blocks_kept=pool.num_kept,
            queued_tokens=load.queued_tokens,
            waiting_sequences=load.waiting_sequences,
            running_sequences=load.running_sequences,
            transfers=self._endpoint.num_active,
            draining=load.is_draining,
            counters=load.counters,
            transfer_stats=self._endpoint.stats(),
            steps=load.steps,
            fetches=load.fetches,
        )

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.changed.set()

    def _report(self, watcher: _Watcher, number: int) -> worker_pb2.WorkerReport:
        watcher.changed.clear()
        self._collect()
        report = worker_pb2.WorkerReport(number=number, load=self.load())
        if watcher.needs_snapshot:
            watcher.needs_snapshot = False
            self._fill(report.snapshot)
        for change in watcher.take():
            report.events.add(
                number=change.number, stored=change.stored, hashes=change.hashes, tier=_TIERS[change.tier]
            )
        return report

    def _fill(self, snapshot: worker_pb2.CacheSnapshot) -> None:
        snapshot.hashes.extend(self._engine.pool.snapshot()[1])
        if (tiers := self._engine.tiers) is not None:
            snapshot.host_hashes.extend(tiers.hashes(CacheTier.HOST))
            snapshot.disk_hashes.extend(tiers.hashes(CacheTier.DISK))

    def _collect(self) -> None:
        """Hand the pool's changes to all watchers; what a watcher has not been told follows its snapshot."""
        for change in self._engine.pool.drain_events():
            if change.number != self._last_number + 1:  # the pool dropped changes that nobody drained
                for watcher in self._watchers:
                    watcher.resync()
            self._last_number = change.number
            for watcher in self._watchers:
                watcher.add(change)
