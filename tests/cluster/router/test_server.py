"""The router over gRPC: it follows its workers, notices whoever is gone, and a session's end gives everything back."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc.aio
import pytest

from baton_pb.v1 import router_pb2, router_pb2_grpc, worker_pb2
from cluster.fake_worker import FakeModel, FakeWorker
from cluster.router.server import RouterServer
from cluster.router.step_model import STARTING
from common.chain_hash import chain_hashes
from common.config import RouterConfig, StepConfig
from common.errors import ConfigError, InvalidRequestError, OverloadedError, WorkerLostError
from common.rpc import open_channel
from common.status import error_from_pb, typed_rpc_errors
from tests.cluster.fake_cluster import BOTH, DECODE, HEARTBEAT_S, HOST, PREFILL, address_of, run, until

CHAIN = chain_hashes(range(16), 4)


@asynccontextmanager
async def routed(*workers: FakeWorker, step: StepConfig | None = None) -> AsyncIterator[RouterServer]:
    router = await RouterServer.start(HOST, 0, RouterConfig(step=step or StepConfig()), HEARTBEAT_S)
    try:
        await router.set_workers([address_of(worker) for worker in workers])
        yield router
    finally:
        await router.stop()
        for worker in workers:
            await worker.stop()


def row(router: RouterServer, worker_id: str) -> router_pb2.WorkerStatus:
    return next(worker for worker in router.status().workers if worker.worker_id == worker_id)


async def state_is(router: RouterServer, worker_id: str, state: str) -> None:
    await until(lambda: row(router, worker_id).state == state, f"{worker_id} is not {state}")


class Gateway:
    """A gateway's end of a session."""

    def __init__(self, router: RouterServer) -> None:
        self.channel = open_channel(router.address)
        self.commands: asyncio.Queue[router_pb2.RouterCommand | None] = asyncio.Queue()
        self.facts: router_pb2.ClusterFacts | None = None
        self._unread = deque[router_pb2.RouterReply]()
        stub: Any = router_pb2_grpc.RouterStub(self.channel)
        self.call: Any = stub.Session(self._send())
        self.send(attach=router_pb2.RouterAttach(gateway_id="g"))

    async def _send(self) -> AsyncIterator[router_pb2.RouterCommand]:
        while (command := await self.commands.get()) is not None:
            yield command

    def send(self, **command: Any) -> None:
        self.commands.put_nowait(router_pb2.RouterCommand(**command))

    async def place(self, reservation_id: str, **request: Any) -> router_pb2.RouterReply:
        request = {"num_tokens": 16, "hashes": CHAIN, **request}
        self.send(place=router_pb2.PlaceRequest(reservation_id=reservation_id, **request))
        return await self.read()

    async def read(self) -> router_pb2.RouterReply:
        while True:
            while self._unread:
                reply = self._unread.popleft()
                if not reply.HasField("facts"):
                    return reply
                self.facts = reply.facts
            with typed_rpc_errors():
                message: router_pb2.RouterReply = await self.call.read()
            self._unread.extend(message.batch.replies if message.HasField("batch") else [message])

    async def close(self) -> None:
        self.commands.put_nowait(None)  # gRPC reads them in a task that outlives a call ended by the other side
        self.call.cancel()
        await self.channel.close(None)


def test_a_session_places_and_its_end_releases_what_it_forgot() -> None:
    async def scenario() -> None:
        decode = await FakeWorker.start("d0", DECODE)
        prefill = await FakeWorker.start("p0", PREFILL)
        async with routed(decode, prefill) as router:
            await state_is(router, "d0", "ready")
            await state_is(router, "p0", "ready")
            gateway = Gateway(router)

            first = await gateway.place("a")
            await gateway.place("b")
            gateway.send(first_token=router_pb2.FirstTokenSeen(reservation_id="a"))
            gateway.send(release=router_pb2.ReleaseRequest(reservation_id="a"))
            await until(lambda: router.status().reservations == 1, "a is not released")

            assert first.placement.decode_address == decode.address
            assert first.placement.prefill.address == prefill.address
            assert gateway.facts is not None
            assert gateway.facts == router_pb2.ClusterFacts(model_id="fake", block_tokens=4, context_tokens=512)
            assert row(router, "d0").reservations == 1
            await gateway.close()
            await until(lambda: router.status().reservations == 0, "b is not released")

    run(scenario())


def test_the_first_placement_is_predicted_from_what_steps_are_configured_to_take() -> None:
    step = StepConfig(base_s=100.0, token_s=1e-3, attention_s=1e-9, sequence_s=1e-3, context_s=1e-7)

    async def scenario() -> None:
        for configured, least_s, most_s in ((None, 0.0, 1.0), (step, 100.0, 1000.0)):
            decode = await FakeWorker.start("d0", DECODE)
            prefill = await FakeWorker.start("p0", PREFILL)
            async with routed(decode, prefill, step=configured) as router:
                await state_is(router, "d0", "ready")
                await state_is(router, "p0", "ready")
                gateway = Gateway(router)

                placed = await gateway.place("a")

                assert least_s <= placed.placement.predicted_ttft_s < most_s
                await gateway.close()

    run(scenario())


def test_what_steps_take_by_default_is_the_same_for_routers_of_both_kinds() -> None:
    """That of a cluster, and one that a simulation makes."""
    assert tuple(StepConfig().model_dump().values()) == STARTING


def test_a_batch_of_commands_is_carried_out_in_order() -> None:
    async def scenario() -> None:
        async with routed(await FakeWorker.start("d0", BOTH)) as router:
            await state_is(router, "d0", "ready")
            gateway = Gateway(router)
            place = [router_pb2.PlaceRequest(reservation_id=name, num_tokens=16, hashes=CHAIN) for name in "ab"]
            commands = [router_pb2.RouterCommand(place=one) for one in place]
            commands.append(router_pb2.RouterCommand(release=router_pb2.ReleaseRequest(reservation_id="a")))

            gateway.send(batch=router_pb2.RouterCommandBatch(commands=commands))
            placed = [(await gateway.read()).reservation_id for _ in range(2)]

            assert placed == ["a", "b"]
            await until(lambda: router.status().reservations == 1, "a is not released")
            await gateway.close()

    run(scenario())


def test_a_release_of_something_unknown_is_counted_and_harmless() -> None:
    async def scenario() -> None:
        async with routed(await FakeWorker.start("d0", DECODE)) as router:
            await state_is(router, "d0", "ready")
            gateway = Gateway(router)

            gateway.send(release=router_pb2.ReleaseRequest(reservation_id="x"))
            reply = await gateway.place("a")

            assert reply.placement.decode_worker_id == "d0"
            assert router.status().counters["unknown_reservations_total"] == 1
            await gateway.close()

    run(scenario())


def test_a_reservation_id_used_twice_and_a_hash_of_another_length_are_refused() -> None:
    async def scenario() -> None:
        async with routed(await FakeWorker.start("d0", DECODE)) as router:
            await state_is(router, "d0", "ready")
            gateway = Gateway(router)

            await gateway.place("a")
            twice = await gateway.place("a")
            odd = await gateway.place("b", hashes=[b"short"])

            assert isinstance(error_from_pb(twice.error), InvalidRequestError)
            assert isinstance(error_from_pb(odd.error), InvalidRequestError)
            assert router.status().reservations == 1
            await gateway.close()

    run(scenario())


def test_beyond_what_the_workers_can_do_a_request_waits_and_is_placed_when_there_is_room() -> None:
    async def scenario() -> None:
        async with routed(await FakeWorker.start("d0", DECODE, FakeModel(running_max=1))) as router:
            await state_is(router, "d0", "ready")
            gateway, other = Gateway(router), Gateway(router)
            for reservation_id in ("a", "b"):
                await gateway.place(reservation_id)

            waits, leaves = await gateway.place("c"), await other.place("c")
            assert waits.queued.wait_max_s > 0
            assert leaves.HasField("queued")
            assert router.status().queued == 2
            await other.close()
            await until(lambda: router.status().queued == 1, "the session's end withdraws nothing")
            gateway.send(release=router_pb2.ReleaseRequest(reservation_id="a"))

            assert (await gateway.read()).placement.decode_worker_id == "d0"
            assert router.status().queued == 0
            await gateway.place("d")
            gateway.send(release=router_pb2.ReleaseRequest(reservation_id="d"))
            await until(lambda: router.status().queued == 0, "a release withdraws nothing")
            await gateway.close()
            await until(lambda: router.status().reservations == 0, "reservations are left")

    run(scenario())


def test_a_wait_ends_at_the_deadline_although_nothing_else_happens() -> None:
    async def scenario() -> None:
        async with routed(await FakeWorker.start("d0", DECODE, FakeModel(running_max=1))) as router:
            await state_is(router, "d0", "ready")
            gateway = Gateway(router)
            for reservation_id in ("a", "b"):
                await gateway.place(reservation_id)

            assert (await gateway.place("c", timeout_s=0.05)).HasField("queued")
            refusal = await gateway.read()

            assert isinstance(error_from_pb(refusal.error), OverloadedError)
            assert refusal.error.retry_after_s > 0
            await gateway.close()

    run(scenario())


def test_a_session_must_begin_by_attaching() -> None:
    async def scenario() -> None:
        async with routed() as router:
            gateway = Gateway(router)
            gateway.commands.get_nowait()

            with pytest.raises(InvalidRequestError, match="attach"):
                await gateway.place("a")
            await gateway.close()

    run(scenario())


def test_nobody_to_place_on_is_answered_at_once_with_a_time_to_retry() -> None:
    async def scenario() -> None:
        async with routed() as router:
            gateway = Gateway(router)
            error = error_from_pb((await gateway.place("a")).error)

            assert isinstance(error, WorkerLostError)
            assert error.retry_after_s > 0
            await gateway.close()

    run(scenario())


def test_a_router_that_has_just_started_answers_when_it_knows_its_workers() -> None:
    async def scenario() -> None:
        worker = await FakeWorker.start("d0", DECODE)
        router = await RouterServer.start(HOST, 0, RouterConfig(), HEARTBEAT_S)
        try:
            gateway = Gateway(router)
            asked = asyncio.create_task(gateway.place("a"))
            await until(lambda: gateway.commands.empty(), "not sent")

            await router.set_workers([address_of(worker)])

            assert (await asked).placement.decode_worker_id == "d0"
            await gateway.close()
        finally:
            await router.stop()
            await worker.stop()

    run(scenario())


def test_events_decide_where_a_prefix_is() -> None:
    async def scenario() -> None:
        holder, other = await FakeWorker.start("d0", DECODE), await FakeWorker.start("d1", DECODE)
        holder.held.update(CHAIN[:1])
        async with routed(holder, other) as router:
            await state_is(router, "d0", "ready")
            await state_is(router, "d1", "ready")
            gateway = Gateway(router)

            assert (await gateway.place("a")).placement.decode_hit_blocks == 1
            gateway.send(release=router_pb2.ReleaseRequest(reservation_id="a"))
            other.store(*CHAIN[:3])
            await until(lambda: router.status().indexed_blocks == 4, "the event did not arrive")
            reply = await gateway.place("b")
            assert (reply.placement.decode_worker_id, reply.placement.decode_hit_blocks) == ("d1", 3)
            gateway.send(release=router_pb2.ReleaseRequest(reservation_id="b"))
            other.evict(*CHAIN[:3])
            await until(lambda: router.status().indexed_blocks == 1, "the event did not arrive")
            assert (await gateway.place("c")).placement.decode_worker_id == "d0"
            await gateway.close()

    run(scenario())


def test_a_gap_in_the_events_is_answered_by_a_snapshot() -> None:
    async def scenario() -> None:
        worker = await FakeWorker.start("d0", DECODE)
        async with routed(worker) as router:
            await state_is(router, "d0", "ready")

            worker.store(CHAIN[0])
            await until(lambda: router.status().indexed_blocks == 1, "the event did not arrive")
            worker.held.add(CHAIN[1])
            worker.store(CHAIN[2], skip=1)
            await until(lambda: router.status().indexed_blocks == 3, "no snapshot came")

            assert worker.num_watches == 2
            assert router.status().counters["event_gaps_total"] == 1
            assert row(router, "d0").state == "ready"

    run(scenario())


def test_a_killed_worker_is_lost_with_its_prefixes_and_is_ready_again_when_it_returns() -> None:
    async def scenario() -> None:
        worker = await FakeWorker.start("d0", DECODE)
        worker.held.update(CHAIN)
        async with routed(worker) as router:
            await state_is(router, "d0", "ready")

            await worker.kill()
            await state_is(router, "d0", "lost")
            assert router.status().indexed_blocks == 0
            assert row(router, "d0").reason

            again = await FakeWorker.start("d0", DECODE, FakeModel(generation=2), worker.address)
            try:
                await state_is(router, "d0", "ready")
                assert row(router, "d0").handshake.generation == 2
                assert router.status().counters["workers_lost_total"] == 1
            finally:
                await again.stop()

    run(scenario())


def test_a_silent_worker_is_lost_after_three_heartbeats() -> None:
    async def scenario() -> None:
        worker = await FakeWorker.start("d0", DECODE)
        async with routed(worker) as router:
            await state_is(router, "d0", "ready")

            worker.is_silent = True
            await until(
                lambda: f"no report for {3 * HEARTBEAT_S:g} s" in row(router, "d0").reason, "silence is not noticed"
            )

            worker.is_silent = False
            await state_is(router, "d0", "ready")

    run(scenario())


def test_a_draining_worker_gets_nothing_new_and_can_come_back() -> None:
    async def scenario() -> None:
        worker = await FakeWorker.start("d0", DECODE)
        async with routed(worker) as router:
            await state_is(router, "d0", "ready")
            worker.load.draining = True
            worker.report()
            await state_is(router, "d0", "draining")
            gateway = Gateway(router)
            assert (await gateway.place("a")).HasField("error")

            worker.load.draining = False
            worker.report()
            await state_is(router, "d0", "ready")
            await gateway.close()

    run(scenario())


@pytest.mark.parametrize(
    ("role", "model", "words"),
    [
        pytest.param(DECODE, FakeModel(model_id="other"), "model id is other", id="model"),
        pytest.param(DECODE, FakeModel(dtype="bfloat16"), "block layout is bfloat16", id="dtype"),
        pytest.param(DECODE, FakeModel(block_tokens=8), "8 tokens", id="block size"),
        pytest.param(DECODE, FakeModel(hash_probe=b"x" * 16), "probe hash of d1", id="hash"),
        pytest.param(BOTH, FakeModel(), "has role WORKER_ROLE_BOTH, not decode", id="role"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_a_readable_reason(
    role: "worker_pb2.WorkerRole.ValueType", model: FakeModel, words: str
) -> None:
    async def scenario() -> None:
        good, odd = await FakeWorker.start("d0", DECODE), await FakeWorker.start("d1", role, model)
        async with routed(good, odd) as router:
            await router.set_workers([address_of(good)])
            await state_is(router, "d0", "ready")
            announced = address_of(odd)
            announced.role = DECODE
            await router.set_workers([address_of(good), announced])

            await state_is(router, "d1", "refused")
            assert words in row(router, "d1").reason
            assert row(router, "d0").state == "ready"

    run(scenario())


def test_another_worker_at_the_address_is_refused() -> None:
    async def scenario() -> None:
        worker = await FakeWorker.start("d7", DECODE)
        async with routed(worker) as router:
            announced = address_of(worker)
            announced.worker_id = "d0"
            await router.set_workers([announced])

            await state_is(router, "d0", "refused")
            assert "is worker 'd7', not 'd0'" in row(router, "d0").reason

    run(scenario())


def test_workers_that_are_not_named_are_forgotten() -> None:
    async def scenario() -> None:
        first, second = await FakeWorker.start("d0", DECODE), await FakeWorker.start("d1", DECODE)
        first.held.update(CHAIN)
        async with routed(first, second) as router:
            await state_is(router, "d0", "ready")
            async with grpc.aio.insecure_channel(router.address) as channel:
                stub: Any = router_pb2_grpc.RouterStub(channel)
                await stub.SetWorkers(router_pb2.SetWorkersRequest(workers=[address_of(second)]))
                status = await stub.GetRouterStatus(router_pb2.GetRouterStatusRequest())

            assert [worker.worker_id for worker in status.workers] == ["d1"]
            assert status.indexed_blocks == 0

    run(scenario())


def test_an_incomplete_worker_list_changes_nothing() -> None:
    async def scenario() -> None:
        worker = await FakeWorker.start("d0", DECODE)
        async with routed(worker) as router:
            with pytest.raises(InvalidRequestError):
                await router.set_workers([router_pb2.WorkerAddress(worker_id="d1")])

            assert [known.worker_id for known in router.status().workers] == ["d0"]

    run(scenario())


def test_a_port_in_use_is_one_clear_error() -> None:
    async def scenario() -> None:
        async with routed() as router:
            port = int(router.address.rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                await RouterServer.start(HOST, port, RouterConfig(), HEARTBEAT_S)

    run(scenario())


def test_a_storm_of_sessions_leaves_no_reservation() -> None:
    async def scenario() -> None:
        draw = Random(5)
        workers = [await FakeWorker.start(f"d{i}", DECODE) for i in range(2)]
        async with routed(*workers) as router:
            for worker in workers:
                await state_is(router, worker.worker_id, "ready")

            async def gateway_life() -> None:
                gateway = Gateway(router)
                for number in range(20):
                    await gateway.place(str(number))
                    if draw.random() < 0.5:
                        gateway.send(release=router_pb2.ReleaseRequest(reservation_id=str(number)))
                await gateway.close()

            await asyncio.gather(*(gateway_life() for _ in range(6)))
            await until(lambda: router.status().reservations == 0, "reservations are left")
            assert all(worker.reservations == 0 for worker in router.status().workers)

    run(scenario())
