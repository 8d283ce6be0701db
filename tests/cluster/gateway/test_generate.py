"""Generate over real gRPC and fake workers: what the client sees, and what the workers were asked."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton_pb.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from cluster.fake_worker import FakeModel
from common.errors import (
    BatonError,
    InvalidRequestError,
    MismatchError,
    NotFoundError,
    OverloadedError,
)
from common.text import Text
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, request, run, until

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def test_tokens_text_usage_timing_and_placement_reach_the_client(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await cluster.ask(request("hello world", max_tokens=12))

            prompt = Text.load(model_dir).encode("hello world")
            assert answer.token_ids == (prompt * 12)[:12]
            assert answer.text == "hello world" * 2
            finished = answer.finished
            assert finished.reason == LENGTH
            assert finished.usage == common_pb2.Usage(prompt_tokens=len(prompt), output_tokens=12, cached_tokens=2)
            assert finished.placement.prefill_worker_id == "p0"
            assert finished.placement.decode_worker_id == "d0"
            assert finished.placement.transport == "fake"
            timing = finished.timing
            assert timing.queue_s + timing.prefill_s == pytest.approx(timing.ttft_s)
            assert 0 < timing.ttft_s <= timing.total_s
            assert len({response.request_id for response in answer.responses}) == 1
            assert cluster.worker("p0").prefilled[0].token_ids == prompt

    run(scenario())


def test_the_first_token_is_sent_at_once(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 0.05
            call = cluster.call(request("hello world", max_tokens=500))

            first = await call.read()
            worker.may_step.clear()

            assert len(first.token_ids) == 1
            call.cancel()
            await until(lambda: worker.num_running == 0, "not cancelled")
            worker.may_step.set()

    run(scenario())


def test_the_worker_gets_ids_seed_and_length_but_no_text(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            await cluster.ask(request([5, 6, 7], stop=["zzz"], max_tokens=2), timeout_s=None)
            await cluster.ask(request([5, 6, 7], seed=9, ignore_eos=True, max_tokens=1))

            first, second = cluster.worker("d0").started
            assert list(first.token_ids) == [5, 6, 7]
            assert first.num_prompt_tokens == 3
            assert list(first.sampling.stop) == []
            assert first.sampling.HasField("seed")
            assert 0 < first.timeout_s <= 3600  # gateway.request_s: the client had no deadline
            assert first.prefill.worker_id == "p0"
            assert (second.sampling.seed, second.sampling.max_tokens) == (9, 1)
            assert 0 < second.timeout_s < 11  # gRPC rounds up
            assert first.request_id != second.request_id

    run(scenario())


def test_max_tokens_is_the_rest_of_the_window_by_default(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, model=FakeModel(context_tokens=40)) as cluster:
            answer = await cluster.ask(request([5] * 30))

            assert len(answer.token_ids) == 10
            with pytest.raises(InvalidRequestError, match="max_tokens must be at most 10 with a prompt of 30 tokens"):
                await cluster.ask(request([5] * 30, max_tokens=11))

    run(scenario())


def test_a_stop_string_over_tokens_ends_the_sequence_at_the_worker(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await cluster.ask(request("hello world", stop=["wor"], max_tokens=400))

            assert answer.text == "hello "
            assert (answer.finished.reason, answer.finished.stop) == (STOP, "wor")
            assert answer.finished.usage.cached_tokens == 2
            assert answer.finished.usage.output_tokens == len(answer.token_ids)
            assert len(cluster.worker("d0").cancelled) == 1

    run(scenario())


def test_a_stop_token_is_counted_but_is_no_text(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            ids = Text.load(model_dir).encode("hello!")
            answer = await cluster.ask(request("hello!", stop_token_ids=[ids[-1]]))

            assert answer.text == "hello"
            assert answer.token_ids == ids
            assert answer.finished.reason == STOP

    run(scenario())


def test_a_chat_is_rendered_by_the_template(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            asked = request(max_tokens=1)
            asked.chat.messages.add(role="user", content="hi")
            await cluster.ask(asked)

            ids = list(cluster.worker("d0").started[0].token_ids)
            text = Text.load(model_dir).decode(ids, skip_special_tokens=False)
            assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    run(scenario())


def test_logprobs_come_one_for_each_token_with_texts(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await cluster.ask(request("hello", logprobs=2, max_tokens=3))

            probs = [token for response in answer.responses for token in response.logprobs]
            assert [token.token_id for token in probs] == answer.token_ids
            assert "".join(token.top[0].text for token in probs) == Text.load(model_dir).decode(answer.token_ids)
            assert all(len(token.top) == 2 and token.logprob == -0.5 for token in probs)

    run(scenario())


def test_requests_of_one_name_do_not_meet(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_decode=2) as cluster:
            asked = [request([number + 10] * 3, max_tokens=5) for number in range(8)]
            for message in asked:
                message.request_id = "same"

            answers = await asyncio.gather(*(cluster.ask(message) for message in asked))

            assert [answer.token_ids for answer in answers] == [[number + 10] * 5 for number in range(8)]
            assert {response.request_id for answer in answers for response in answer.responses} == {"same"}
            assert cluster.worker("d0").num_sessions <= 1

    run(scenario())


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        pytest.param(inference_pb2.GenerateRequest(text="x", model="gpt"), NotFoundError, "'gpt'", id="model"),
        pytest.param(request(""), InvalidRequestError, "prompt is empty", id="empty"),
        pytest.param(request([1] * 512), InvalidRequestError, "prompt has 512 tokens, at most 511", id="window"),
        pytest.param(request([1] * 500, max_tokens=13), InvalidRequestError, "at most 12", id="max_tokens"),
        pytest.param(request(temperature=float("nan")), InvalidRequestError, "got nan", id="nan"),
        pytest.param(request("x" * 200_000), InvalidRequestError, "200000 characters", id="characters"),
    ],
)
def test_a_bad_request_costs_no_worker_anything(
    model_dir: Path, asked: inference_pb2.GenerateRequest, error: type[BatonError], words: str
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            with pytest.raises(error, match=words):
                await cluster.ask(asked)

            assert cluster.worker("d0").started == []
            status = await cluster.status()
            assert status.router.placements_total == 0
            assert sum(status.gateway.errors_total.values()) == 1

    run(scenario())


def test_a_prompt_larger_than_the_pools_is_invalid(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, model=FakeModel(num_blocks=4)) as cluster:
            with pytest.raises(
                InvalidRequestError, match="prompt has 20 tokens, the largest pool of a worker holds 16"
            ):
                await cluster.ask(request([1] * 20, max_tokens=1))

            assert len((await cluster.ask(request([1] * 9, max_tokens=1))).token_ids) == 1

    run(scenario())


def test_workers_of_another_model_are_a_mismatch(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, model=FakeModel(model_id="other")) as cluster:
            with pytest.raises(MismatchError, match="the workers serve model 'other', this gateway 'fake'"):
                await cluster.ask(request())

    run(scenario())


def test_more_requests_than_may_run_are_refused_with_a_time_to_retry(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, running_max=2) as cluster:
            worker = cluster.worker("d0")
            worker.may_step.clear()
            running = [asyncio.create_task(cluster.ask(request(max_tokens=2))) for _ in range(2)]
            await until(lambda: len(worker.started) == 2, "not started")

            with pytest.raises(OverloadedError, match="2 requests run here") as caught:
                await cluster.ask(request(max_tokens=2))
            assert caught.value.retry_after_s > 0

            worker.may_step.set()
            assert [len((await task).token_ids) for task in running] == [2, 2]
            assert len((await cluster.ask(request(max_tokens=2))).token_ids) == 2

    run(scenario())


def test_a_client_that_does_not_read_is_ended_and_others_go_on(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, unread_tokens_max=20) as cluster:
            stream = worker_pb2.StartRequest(
                request_id="x", token_ids=[1], num_prompt_tokens=1, sampling=common_pb2.SamplingParams(max_tokens=400)
            )
            reader: Any = cluster.gateway._workers.start("d0", cluster.worker("d0").address, stream)
            await until(lambda: cluster.worker("d0").cancelled == ["x"], "not cancelled")

            with pytest.raises(OverloadedError, match="more than 20 tokens unread"):
                await reader.next()
            reader.close()
            assert len((await cluster.ask(request(max_tokens=5))).token_ids) == 5

    run(scenario())


def test_a_client_that_does_not_read_keeps_no_place_at_workers_that_are_done(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
            async with grpc.aio.insecure_channel(cluster.gateway.grpc_address, options=narrow) as channel:
                call: Any = inference_pb2_grpc.InferenceStub(channel).Generate(request(max_tokens=500, logprobs=20))
                tokens = list((await call.read()).token_ids)
                worker = cluster.worker("d0")
                await until(lambda: worker.num_running == 0, "not done")
                await until(lambda: cluster.gateway._router.num_reservations == 0, "the place is kept")

                assert (await cluster.status()).gateway.running_requests == 1
                while isinstance(response := await call.read(), inference_pb2.GenerateResponse):
                    tokens += response.token_ids
                assert len(tokens) == 500

    run(scenario())


def test_a_client_that_does_not_read_is_not_tried_on_another_worker(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, num_decode=2, unread_tokens_max=20) as cluster:
            narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
            async with grpc.aio.insecure_channel(cluster.gateway.grpc_address, options=narrow) as channel:
                call: Any = inference_pb2_grpc.InferenceStub(channel).Generate(request(max_tokens=500, logprobs=20))
                await call.read()
                workers = cluster.workers.values()
                await until(lambda: any(worker.cancelled for worker in workers), "not cancelled")

                with contextlib.suppress(grpc.aio.AioRpcError):
                    while isinstance(await call.read(), inference_pb2.GenerateResponse):
                        pass

            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await call.details() == "the client left more than 20 tokens unread"
            assert sum(len(worker.started) for worker in workers) == 1
            assert "retries_total" not in (await cluster.status()).gateway.counters

    run(scenario())


async def _storm(cluster: FakeCluster, count: int) -> None:
    async def one(number: int) -> None:
        call = cluster.call(request([number % 300 + 1] * (number % 9 + 1), max_tokens=number % 40 + 1))
        for _ in range(number % 7):
            await call.read()
        if number % 3:
            call.cancel()
        else:
            while isinstance(response := await call.read(), inference_pb2.GenerateResponse):
                assert set(response.token_ids) <= {number % 300 + 1}

    await asyncio.gather(*(one(number) for number in range(count)))


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "least_loaded"])
def test_a_storm_of_requests_and_cancels_leaves_nothing(model_dir: Path, policy: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=2, num_decode=2, num_both=1, policy=policy) as cluster:
            await _storm(cluster, 60)

            await until(lambda: cluster.router.status().reservations == 0, "reservations are left")
            assert all(worker.reservations == 0 for worker in cluster.router.status().workers)

    run(scenario())
