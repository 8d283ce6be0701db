"""Every worker says who it is and reports what changed: numbered, batched, and at least every heartbeat."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.chain_hash import probe
from common.errors import DeadlineError
from common.rpc import open_channel
from engine.fake import FakeEngine
from engine.rpc_server import RpcServer, deadline
from engine.service import Identity, LoopLoad, WorkerService
from kvtransfer.fake import FakeNetwork

LIMIT_S = 10.0


class IdleLoop:
    """A loop that does nothing; tests change its pool and say so."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.waiting = 0
        self.drained_for: list[float] = []

    def load(self) -> LoopLoad:
        return LoopLoad(10 * self.waiting, self.waiting, 0, bool(self.drained_for), Counter(seen_total=3))

    def on_change(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def changed(self) -> None:
        for listener in self.listeners:
            listener()

    async def drain(self, timeout_s: float) -> int:
        self.drained_for.append(timeout_s)
        return 2


class Bench:
    """A service, its engine and loop, and a channel to it."""

    def __init__(self, engine: FakeEngine, loop: IdleLoop, service: WorkerService, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.loop = loop
        self.service = service
        self.stub: Any = worker_pb2_grpc.WorkerStub(channel)  # the stubs of the stubs know synchronous calls only
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def watch(self, heartbeat_s: float = 0.0) -> "Watch":
        return Watch(self.stub.Watch(worker_pb2.WatchRequest(heartbeat_s=heartbeat_s)))

    def store(self, *hashes: bytes) -> None:
        blocks = self.engine.pool.allocate(len(hashes))
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.engine.pool.seal(block, block_hash)
        self.engine.pool.release(blocks)
        self.loop.changed()


class Watch:
    """Follows a Watch stream as a router does. `held` is what it believes the worker to hold."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.held: set[bytes] = set()
        self.number = 0
        self.last_event: int | None = None
        self.num_snapshots = 0

    async def next(self) -> worker_pb2.WorkerReport:
        report = await asyncio.wait_for(self._call.read(), LIMIT_S)
        assert isinstance(report, worker_pb2.WorkerReport)
        assert report.number == self.number + 1
        self.number = report.number
        if report.HasField("snapshot"):
            self.held, self.last_event = set(report.snapshot.hashes), None
            self.num_snapshots += 1
        for event in report.events:
            assert self.last_event is None or event.number == self.last_event + 1
            self.last_event = event.number
            if event.stored:
                self.held |= set(event.hashes)
            else:
                self.held -= set(event.hashes)
        return report

    async def until(self, held: set[bytes]) -> None:
        while self.held != held:
            await self.next()


@asynccontextmanager
async def serving(heartbeat_s: float = 5.0, num_blocks: int = 8) -> AsyncIterator[Bench]:
    engine, loop = FakeEngine(num_blocks=num_blocks), IdleLoop()
    engine.slow_paths = ("no compiler",)
    endpoint = FakeNetwork().endpoint("w", engine.kv)  # type: ignore[arg-type]  # it needs a BlockStore only
    endpoint.slow_paths = ("memmove",)
    limits = worker_pb2.WorkerLimits(running_max=3, waiting_max=5, token_budget=7)
    service = WorkerService(Identity("w", worker_pb2.WORKER_ROLE_DECODE, heartbeat_s, limits), engine, endpoint, loop)
    server = RpcServer.bind("127.0.0.1")
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server.server)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield Bench(engine, loop, service, channel)
    finally:
        await server.stop(0.0)
        engine.close()


def test_the_handshake_tells_what_callers_compare() -> None:
    async def main() -> None:
        async with serving() as bench:
            reply = await bench.stub.Handshake(worker_pb2.HandshakeRequest())

            assert (reply.worker_id, reply.role, reply.model_id) == ("w", worker_pb2.WORKER_ROLE_DECODE, "fake")
            assert reply.generation == bench.service.generation
            assert reply.hash_probe == probe(4)
            assert reply.layout == bench.engine.layout.to_pb()
            assert reply.block_bytes == bench.engine.layout.block_bytes
            assert (reply.num_blocks, reply.context_tokens, reply.backend) == (8, 4096, "fake")
            assert reply.transfer.worker_id == "w"
            assert list(reply.slow_paths) == ["no compiler", "memmove"]
            assert reply.limits == worker_pb2.WorkerLimits(running_max=3, waiting_max=5, token_budget=7)

    asyncio.run(main())


def test_generations_differ_between_lives() -> None:
    async def main() -> None:
        async with serving() as first, serving() as second:
            assert first.service.generation != second.service.generation

    asyncio.run(main())


def test_the_first_report_is_a_snapshot_and_events_continue_it() -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.store(b"a", b"b")
            watch = bench.watch()
            first = await watch.next()
            assert set(first.snapshot.hashes) == {b"a", b"b"}
            assert not first.events
            assert (first.load.blocks_free, first.load.blocks_kept, first.load.counters["seen_total"]) == (6, 2, 3)

            bench.store(b"c")
            await watch.until({b"a", b"b", b"c"})
            bench.store(*(bytes([i]) for i in range(7)))  # evicts all but one
            held = set(bench.engine.pool.snapshot()[1])
            await watch.until(held)

            assert len(held) == 8
            assert watch.num_snapshots == 1

    asyncio.run(main())


def test_watchers_of_different_ages_believe_the_same() -> None:
    async def main() -> None:
        async with serving(num_blocks=6) as bench:
            older = bench.watch()
            await older.next()
            for number in range(20):
                bench.store(number.to_bytes(2, "big"))
                if number % 7 == 0:
                    await older.next()
            younger = bench.watch()
            held = set(bench.engine.pool.snapshot()[1])
            await older.until(held)
            await younger.until(held)

            assert (older.num_snapshots, younger.num_snapshots) == (1, 1)

    asyncio.run(main())


def test_changes_close_together_are_one_report() -> None:
    async def main() -> None:
        async with serving() as bench:
            watch = bench.watch()
            await watch.next()
            for number in range(1, 6):
                bench.loop.waiting = number
                bench.loop.changed()
            report = await watch.next()

            assert (report.load.waiting_sequences, report.load.queued_tokens) == (5, 50)
            assert watch.number == 2

    asyncio.run(main())


@pytest.mark.parametrize(("own_s", "asked_s"), [(0.06, 0.0), (5.0, 0.06), (0.06, 60.0)])
def test_a_quiet_worker_still_reports_every_heartbeat(own_s: float, asked_s: float) -> None:
    async def main() -> None:
        async with serving(heartbeat_s=own_s) as bench:
            watch = bench.watch(asked_s)
            async with asyncio.timeout(2.0):
                for _ in range(4):
                    await watch.next()

    asyncio.run(main())


def test_changes_that_nobody_drained_are_replaced_by_a_snapshot() -> None:
    async def main() -> None:
        async with serving(num_blocks=1) as bench:
            watch = bench.watch()
            await watch.next()
            # Without letting the service run: more than the pool remembers.
            for number in range(1 << 15):
                bench.store(number.to_bytes(3, "big"))
            held = set(bench.engine.pool.snapshot()[1])
            bench.store(b"last one")
            await watch.until({b"last one"})

            assert held != watch.held
            assert watch.num_snapshots == 2

    asyncio.run(main())


def test_drain_is_the_loops_and_health_follows_the_worker() -> None:
    async def main() -> None:
        async with serving() as bench:
            reply = await bench.stub.Drain(worker_pb2.DrainRequest(timeout_s=1.5))
            health = await bench.health.Check(health_pb2.HealthCheckRequest())

            assert reply.unfinished == 2
            assert bench.loop.drained_for == [1.5]
            assert health.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(main())


def test_a_deadline_is_a_typed_error_and_other_timeouts_are_not_mistaken_for_it() -> None:
    async def main() -> None:
        with pytest.raises(DeadlineError, match=r"0\.010 s"):
            async with deadline(0.01):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with deadline(0.0):
                raise TimeoutError

    asyncio.run(main())
