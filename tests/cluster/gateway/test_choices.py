"""Several answers, to one prompt or to each of a batch, come as one stream, with index, seed and end of each."""

from pathlib import Path
from typing import Any

import pytest

from cluster.asking import batch_request
from cluster.async_client import AsyncClient
from common.errors import InvalidRequestError, OverloadedError
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, request, run, until


def asked(n: int, **sampling: Any) -> Any:
    made = request([5, 6, 7], **sampling)
    made.n = n
    return made


def seeds(cluster: FakeCluster) -> list[int]:
    return sorted(start.sampling.seed for start in cluster.worker("d0").started)


def test_each_choice_is_whole_and_says_which_it_is(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await cluster.ask(asked(3, max_tokens=4, seed=2**64 - 1))

            for choice in range(3):
                parts = [response for response in answer.responses if response.choice == choice]
                assert [i for part in parts for i in part.token_ids] == [5, 6, 7, 5]
                assert [part.HasField("finished") for part in parts] == [*[False] * (len(parts) - 1), True]
                assert parts[-1].finished.usage.output_tokens == 4
            assert seeds(cluster) == [0, 1, 2**64 - 1]
            assert len({response.request_id for response in answer.responses}) == 1

    run(scenario())


def test_seeds_that_nobody_gave_are_drawn_for_each_choice(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            await cluster.ask(asked(4, max_tokens=1))

            assert len(set(seeds(cluster))) == 4

    run(scenario())


def test_a_batch_answers_each_prompt_with_n_choices_numbered_as_over_http(model_dir: Path) -> None:
    async def scenario() -> None:
        async with (
            fake_cluster(model_dir) as cluster,
            AsyncClient(cluster.gateway.grpc_address) as client,
        ):
            asked = batch_request([[5, 6, 7], "hello world", [8, 9]], {"max_tokens": 3, "seed": 40})
            asked.n = 2

            answers = await client.ask_all(asked)

            ids = [answer.token_ids for answer in answers]
            assert ids == [(5, 6, 7), (5, 6, 7), ids[2], ids[2], (8, 9, 8), (8, 9, 8)]
            assert ids[2] == (await client.ask(request("hello world", max_tokens=3))).token_ids
            assert [answer.finished.usage.prompt_tokens for answer in answers[::4]] == [3, 2]
            assert seeds(cluster)[:6].count(40) == seeds(cluster)[:6].count(41) == 3
            assert len({answer.request_id for answer in answers}) == 1
            assert (await client.ask(batch_request([[8, 9]], {"max_tokens": 3}))).token_ids == (8, 9, 8)

    run(scenario())


def test_a_batch_whose_client_leaves_or_of_which_one_prompt_fails_ends_as_a_whole(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, retries_max=0) as cluster:
            worker = cluster.worker("d0")
            worker.may_step.clear()
            call = cluster.call(batch_request([[5], [6], [7]]))
            await until(lambda: worker.num_running == 3, "not started")

            call.cancel()

            await until(lambda: worker.num_running == 0, "prompts are left")
            with pytest.raises(InvalidRequestError, match=r"batch\.prompts\[2\] has 600 tokens"):
                await cluster.ask(batch_request([[5], [6], [7] * 600]))
            await until(lambda: worker.num_running == 0, "prompts are left")

    run(scenario())


def test_too_many_choices_are_refused_before_any_worker_is_asked(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            with pytest.raises(InvalidRequestError, match="n must be at most 16, got 17"):
                await cluster.ask(asked(17))
            assert cluster.worker("d0").started == []

    run(scenario())


def test_one_choice_that_fails_ends_the_others_with_its_error(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, retries_max=0) as cluster:
            cluster.worker("d0").refuse(OverloadedError("need 4 blocks, 1 available", 2.5))

            with pytest.raises(OverloadedError, match="need 4 blocks") as caught:
                await cluster.ask(asked(3))

            assert caught.value.retry_after_s == 2.5
            await until(lambda: cluster.worker("d0").num_running == 0, "choices are left")

    run(scenario())


def test_a_large_prompt_is_not_copied_for_more_choices_than_memory_should_hold(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            asked = request([5] * (2 << 20), max_tokens=1, seed=1)
            asked.n = 16

            with pytest.raises(InvalidRequestError, match="n must be less for prompts of this size"):
                await cluster.ask(asked)

    run(scenario())


def test_leaving_frees_all_choices(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            worker = cluster.worker("d0")
            worker.step_s = 0.02
            call = cluster.call(asked(3))
            await until(lambda: worker.num_running == 3, "not started")

            call.cancel()

            await until(lambda: worker.num_running == 0, "choices are left")

    run(scenario())


def test_choices_with_remote_prefill_each_take_and_give_back_a_reservation_of_their_own(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await cluster.ask(asked(3, max_tokens=4))

            assert {response.choice for response in answer.responses} == {0, 1, 2}
            assert len(cluster.worker("p0").prefilled) == 3
            assert cluster.router.status().placements_total == 3
            assert {r.finished.placement.prefill_worker_id for r in answer.responses if r.HasField("finished")} == {
                "p0"
            }

    run(scenario())  # at its end no reservation, request or sequence may be left
