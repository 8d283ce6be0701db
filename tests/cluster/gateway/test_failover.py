"""Whoever dies, the request goes on elsewhere with the tokens it has; without an elsewhere the error is typed."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.fake_worker import FakeModel
from common.chain_hash import chain_hashes
from common.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    TransferError,
    WorkerLostError,
)
from common.status import typed_rpc_errors
from tests.cluster.fake_cluster import (
    LIMIT_S,
    FakeCluster,
    fake_cluster,
    request,
    run,
    start_again,
    until,
    within_a_second,
)


def test_streams_of_a_decode_worker_killed_in_the_middle_go_on_elsewhere_with_the_same_tokens(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_decode=2) as cluster:
            expected = (await cluster.ask(request(max_tokens=60))).token_ids
            for worker in cluster.workers.values():
                worker.step_s = 0.01
            calls = [aiter(cluster.call(request(max_tokens=60))) for _ in range(4)]
            begun = [[await anext(answers) for _ in range(3)] for answers in calls]
            victim = next(name for name in ("d0", "d1") if cluster.worker(name).num_running)

            await cluster.worker(victim).kill()

            for call, responses in zip(calls, begun, strict=True):
                responses += [response async for response in call]
                assert [token for response in responses for token in response.token_ids] == expected
                assert responses[-1].finished.placement.decode_worker_id not in ("", victim)
                assert responses[-1].finished.usage.output_tokens == 60
            assert (await cluster.status()).gateway.counters["retries_total"] >= 1

    run(scenario())


def test_a_stream_whose_only_decode_worker_is_killed_ends_as_unavailable_at_once(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            cluster.worker("d0").step_s = 0.02
            call = cluster.call(request(max_tokens=400))
            await call.read()

            await cluster.worker("d0").kill()

            error = await _read(call, 400)
            assert type(error) is WorkerLostError
            assert "decode worker d0 was lost" in error.message

    run(scenario())


async def _read(call: Any, count: int) -> BatonError | None:
    """Read some responses, then cancel; return the error that ended the call instead, if one did."""
    try:
        with typed_rpc_errors():
            for _ in range(count):
                await call.read()
    except BatonError as error:
        return error
    call.cancel()
    return None


def test_a_decode_worker_killed_before_the_first_token_is_replaced_by_another(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, num_decode=2) as cluster:
            for worker in cluster.workers.values():
                worker.may_step.clear()
            asked = asyncio.create_task(cluster.ask(request(max_tokens=3)))
            await until(lambda: any(worker.started for worker in cluster.workers.values()), "not started")
            victim = next(name for name, worker in cluster.workers.items() if worker.started)

            await cluster.worker(victim).kill()
            for worker in cluster.workers.values():
                worker.may_step.set()

            answer = await asked
            assert len(answer.token_ids) == 3
            assert answer.finished.placement.decode_worker_id != victim
            assert (await cluster.status()).gateway.counters["retries_total"] == 1

    run(scenario())


def test_the_only_decode_worker_gone_is_unavailable_and_its_return_is_enough(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            await cluster.ask(request(max_tokens=1))
            await cluster.worker("d0").kill()

            with pytest.raises(WorkerLostError) as caught:
                await cluster.ask(request(max_tokens=1))
            assert caught.value.message

            await cluster.restart_worker("d0")
            await cluster.all_ready()
            assert len((await cluster.ask(request(max_tokens=2))).token_ids) == 2

    run(scenario())


@pytest.mark.parametrize(
    ("error", "num_prefill"),
    [
        pytest.param(WorkerLostError("gone"), 2, id="lost"),
        pytest.param(TransferError("checksum"), 2, id="transfer"),
        pytest.param(WorkerLostError("gone"), 1, id="the only one lost"),
    ],
)
def test_a_failed_prefill_is_tried_elsewhere(model_dir: Path, error: BatonError, num_prefill: int) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=num_prefill) as cluster:
            cluster.worker("p0").store(*chain_hashes([7] * 8, 4))
            await until(lambda: cluster.router.status().indexed_blocks == 2, "not announced")
            cluster.worker("p0").refuse(error)

            answer = await cluster.ask(request([7] * 8, max_tokens=3))

            assert len(cluster.worker("p0").prefilled) == 1
            assert len(answer.token_ids) == 3
            placement, counters = answer.finished.placement, cluster.router.status().counters
            if num_prefill == 2:
                assert placement.prefill_worker_id == "p1"
                assert counters["local_prefill_fallback"] == 0
            else:
                assert not placement.HasField("prefill_worker_id")
                assert counters["local_prefill_fallback"] == 1

    run(scenario())


def test_a_prefill_worker_killed_while_it_prefills_is_replaced(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            worker = cluster.worker("p0")
            worker.may_step.clear()
            asked = asyncio.create_task(cluster.ask(request(max_tokens=3)))
            await until(lambda: len(worker.prefilled) == 1, "not prefilling")

            await worker.kill()

            answer = await asked
            assert len(answer.token_ids) == 3
            assert not answer.finished.placement.HasField("prefill_worker_id")

    run(scenario())


def test_an_error_of_the_prefill_worker_keeps_its_code_and_words(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            cluster.worker("p0").refuse(InvalidRequestError("grammar has 9 rules, at most 8"))

            with pytest.raises(InvalidRequestError, match="grammar has 9 rules, at most 8"):
                await cluster.ask(request())

            assert len(cluster.worker("d0").started) == 1

    run(scenario())


def test_a_refusal_for_lack_of_room_is_tried_elsewhere_and_then_told_with_its_retry_after(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, num_decode=2) as cluster:
            full = OverloadedError("need 4 blocks, 1 available", 2.5)
            cluster.worker("d0").refuse(full)
            cluster.worker("d1").refuse(full)

            with pytest.raises(OverloadedError, match="need 4 blocks, 1 available") as caught:
                await cluster.ask(request(max_tokens=1))

            assert caught.value.retry_after_s == 2.5
            assert [len(worker.started) for worker in cluster.workers.values()] == [1, 1]
            cluster.worker("d0").refuse(full)
            cluster.worker("d1").report()
            for _ in range(4):
                assert len((await cluster.ask(request(max_tokens=1))).token_ids) == 1

    run(scenario())


def test_tries_have_a_limit(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, num_decode=4, retries_max=2) as cluster:
            for worker in cluster.workers.values():
                worker.refuse(OverloadedError("full"))

            with pytest.raises(OverloadedError, match="full"):
                await cluster.ask(request())

            assert sum(len(worker.started) for worker in cluster.workers.values()) == 3

    run(scenario())


async def _held(cluster: FakeCluster, count: int) -> None:
    await until(lambda: cluster.router.status().reservations == count, f"{count} are not held")


def test_a_router_restart_disturbs_no_stream_and_the_new_one_counts_it(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 0.01
            worker.held.update([b"x" * 16])
            call = cluster.call(request(max_tokens=400))
            await call.read()

            await cluster.restart_router()
            await _held(cluster, 1)
            await cluster.all_ready()

            status = {known.worker_id: known.reservations for known in cluster.router.status().workers}
            assert status == {"p0": 0, "d0": 1}
            assert cluster.router.status().counters["holds_total"] == 1
            assert cluster.router.status().indexed_blocks == 1
            assert (await call.read()).token_ids
            call.cancel()
            await _held(cluster, 0)
            worker.step_s = 0.0
            assert len((await cluster.ask(request(max_tokens=2))).token_ids) == 2

    run(scenario())


def test_a_request_that_meets_no_router_waits_for_it(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            await cluster.ask(request(max_tokens=1))
            stopping = asyncio.create_task(cluster.restart_router())
            await until(lambda: not cluster.gateway._router._connected.is_set(), "still connected")

            asked = asyncio.create_task(cluster.ask(request(max_tokens=2)))
            await stopping

            assert len((await asked).token_ids) == 2

    run(scenario())


def test_a_router_that_stays_away_is_unavailable_after_the_configured_wait(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, router_wait_s=0.2) as cluster:
            await cluster.ask(request(max_tokens=1))
            await cluster.router.stop()
            await until(lambda: not cluster.gateway._router._connected.is_set(), "still connected")

            with pytest.raises(WorkerLostError, match=r"the router at .* is away; waited 0.2 s") as caught:
                await cluster.ask(request(max_tokens=1))

            assert caught.value.retry_after_s > 0
            status = await cluster.status()
            assert status.router.counters["unreachable"] == 1
            await cluster.restart_router()
            await cluster.all_ready()

    run(scenario())


@pytest.mark.parametrize("stage", ["queued at prefill", "decoding"])
def test_a_client_that_leaves_frees_everything(model_dir: Path, stage: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            worker, prefill = cluster.worker("d0"), cluster.worker("p0")
            worker.step_s = 0.01
            if stage == "decoding":
                call = cluster.call(request(max_tokens=400))
                await call.read()
            else:
                prefill.may_step.clear()
                call = cluster.call(request(max_tokens=400))
                await until(lambda: len(prefill.prefilled) == 1, "not prefilling")

            call.cancel()

            await within_a_second(lambda: len(worker.cancelled) == 1, "the worker was not told")
            await _held(cluster, 0)
            prefill.may_step.set()

    run(scenario())


@pytest.mark.parametrize("ending", ["leaves", "deadline"])
def test_a_request_that_ends_while_it_waits_for_a_worker_frees_its_place(model_dir: Path, ending: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, model=FakeModel(running_max=1)) as cluster:
            cluster.worker("d0").may_step.clear()
            others = [asyncio.create_task(cluster.ask(request(max_tokens=2))) for _ in range(2)]
            await until(lambda: cluster.router.status().reservations == 2, "not placed")
            call = cluster.call(request(max_tokens=2), 0.5 if ending == "deadline" else LIMIT_S)
            if ending == "leaves":
                await until(lambda: cluster.router.status().queued == 1, "does not wait")
                call.cancel()

            async with asyncio.timeout(LIMIT_S):
                code = await call.code()

            assert code is (grpc.StatusCode.CANCELLED if ending == "leaves" else grpc.StatusCode.DEADLINE_EXCEEDED)
            await until(lambda: cluster.router.status().queued == 0, "still waits")
            await until(lambda: cluster.gateway._counts.running == 2, "still counted")
            cluster.worker("d0").may_step.set()
            assert [len((await other).token_ids) for other in others] == [2, 2]

    run(scenario())


def test_a_client_that_leaves_while_there_is_no_router_frees_its_place(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, running_max=1) as cluster:
            await cluster.ask(request(max_tokens=1))
            await cluster.router.stop()
            call = cluster.call(request(max_tokens=1))
            await until(lambda: cluster.gateway._counts.queued == 1, "not waiting")

            call.cancel()

            await within_a_second(lambda: cluster.gateway._counts.running == 0, "its place is taken")
            await cluster.restart_router()
            await cluster.all_ready()
            await cluster.ask(request(max_tokens=1))

    run(scenario())


def test_a_deadline_ends_the_request_everywhere(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            worker = cluster.worker("d0")
            worker.may_step.clear()

            with pytest.raises(DeadlineError):
                await cluster.ask(request(max_tokens=4), timeout_s=0.3)

            await within_a_second(lambda: len(worker.cancelled) == 1, "the worker was not told")
            await _held(cluster, 0)
            worker.may_step.set()

    run(scenario())


def test_a_gateway_that_stops_ends_its_streams_and_sequences(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 0.01
            call = cluster.call(request(max_tokens=400))
            await call.read()

            await cluster.gateway.stop()
            await cluster.gateway.stop()

            error = await _read(call, 400)
            assert error is not None
            assert (type(error), error.message, error.retry_after_s) == (WorkerLostError, "the gateway stops", 1.0)
            await until(lambda: worker.num_running == 0, "the sequence goes on")
            await _held(cluster, 0)
            await start_again(cluster, model_dir)

    run(scenario())
