"""A placement says why: to operators by request id, and to a client that asks in its own answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_pb.v1 import router_pb2
from cluster.client import Client
from cluster.commands.explain import explain, explanations_json, headline
from cluster.gateway.explained import ANSWER_KEY, ASK_KEY, explanation_metadata, wants_explanation
from cluster.tenants import key_file
from common.errors import NotFoundError
from common.status import typed_rpc_errors
from tests.cluster.fake_cluster import LIMIT_S, FakeCluster, bearer, fake_cluster, request, run


async def explained(cluster: FakeCluster, request_id: str) -> router_pb2.ExplainReply:
    with typed_rpc_errors():
        reply: router_pb2.ExplainReply = await cluster.admin.Explain(
            router_pb2.ExplainRequest(request_id=request_id), timeout=LIMIT_S, metadata=cluster.metadata
        )
    return reply


def test_a_request_is_explained_by_its_id(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="cost") as cluster:
            asked = request(max_tokens=3)
            asked.request_id = "mine"
            await cluster.ask(asked)

            reply = await explained(cluster, "mine")

            (placement,) = reply.placements
            assert (placement.policy, placement.decode_worker_id, placement.prefill_worker_id) == ("cost", "d0", "p0")
            chosen = [pair for pair in placement.considered if pair.is_chosen]
            assert len(chosen) == 1
            assert chosen[0].total_s == pytest.approx(sum(term.seconds for term in chosen[0].terms))
            assert chosen[0].total_s == min(pair.total_s for pair in placement.considered)
            assert placement.predicted_ttft_s > 0
            assert placement.observed_ttft_s > 0
            with pytest.raises(NotFoundError, match="does not remember a placement of request 'other'"):
                await explained(cluster, "other")

    run(scenario())


def test_the_command_takes_the_id_of_an_answer_over_http(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def show(address: str, request_id: str) -> str:
        explain(Client(address), request_id, as_json=True)
        return str(json.loads(capsys.readouterr().out)[0]["request_id"])

    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="cost") as cluster:
            for name in ("mine", "cmpl-taken"):
                asked = request(max_tokens=1)
                asked.request_id = name
                await cluster.ask(asked)

            for given, shown in (
                ("mine", "mine"),
                ("cmpl-mine", "mine"),
                ("chatcmpl-mine", "mine"),
                ("cmpl-taken", "cmpl-taken"),
            ):
                assert await asyncio.to_thread(show, cluster.gateway.grpc_address, given) == shown
            for nobodys in ("chatmine", "cmpl-other"):
                with pytest.raises(NotFoundError):
                    await asyncio.to_thread(show, cluster.gateway.grpc_address, nobodys)

    run(scenario())


def test_another_policy_tells_the_estimate_of_what_it_chose(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="round_robin") as cluster:
            asked = request(max_tokens=1)
            asked.request_id = "mine"
            await cluster.ask(asked)

            (placement,) = (await explained(cluster, "mine")).placements

            assert (placement.policy, placement.reason) == ("round_robin", "round_robin: turn 1")
            assert [pair.is_chosen for pair in placement.considered] == [True]

    run(scenario())


def test_a_client_that_asks_finds_it_in_the_trailing_metadata_and_nobody_else_does(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="cost") as cluster:
            asking = cluster.stub.Generate(
                request(max_tokens=2), timeout=LIMIT_S, metadata=(*cluster.metadata, (ASK_KEY, "1"))
            )
            responses = [response async for response in asking]
            told = dict(await asking.trailing_metadata())
            silent = cluster.call(request(max_tokens=2))
            async for _ in silent:
                pass

            (placement,) = json.loads(told[ANSWER_KEY])["placements"]
            assert placement["request_id"] == responses[0].request_id
            assert placement["decode_worker_id"] == "d0"
            assert ANSWER_KEY not in dict(await silent.trailing_metadata())

    run(scenario())


def test_all_choices_of_an_answer_are_explained(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="cost") as cluster:
            asked = request(max_tokens=2)
            asked.request_id, asked.n = "mine", 3
            asking = cluster.stub.Generate(asked, timeout=LIMIT_S, metadata=((ASK_KEY, "1"),))
            async for _ in asking:
                pass

            placements = json.loads(dict(await asking.trailing_metadata())[ANSWER_KEY])["placements"]
            assert [placement["request_id"] for placement in placements] == ["mine.0", "mine.1", "mine.2"]
            reply = await explained(cluster, "mine")
            assert [placement.request_id for placement in reply.placements] == ["mine.0", "mine.1", "mine.2"]

    run(scenario())


def test_the_choices_that_the_router_remembers_are_explained_also_where_it_forgot_the_first(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="cost") as cluster:
            for number in (2, 1):  # as if the others were forgotten
                asked = request(max_tokens=2)
                asked.request_id = f"mine.{number}"
                await cluster.ask(asked)

            reply = await explained(cluster, "mine")
            assert [placement.request_id for placement in reply.placements] == ["mine.1", "mine.2"]
            assert [each.request_id for each in (await explained(cluster, "mine.2")).placements] == ["mine.2"]

    run(scenario())


def test_of_many_choices_as_many_are_explained_as_have_room() -> None:
    one = router_pb2.PlacementExplanation(request_id="x" * 128, reason="y" * 200)
    [(_, text)] = explanation_metadata(router_pb2.ExplainReply(placements=[one] * 128))

    assert 10 < len(json.loads(text)["placements"]) < 20
    assert len(text) < 6000


def test_a_client_is_not_told_of_another_tenants_request_by_giving_its_own_the_same_id(
    model_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    admin = key_file.add_key(path, "ops", "admin", {}).key
    one, two = (key_file.add_key(path, tenant, "user", {}).key for tenant in ("one", "two"))

    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="cost", keys_file=path, admin_key=admin) as cluster:
            asked = request(max_tokens=2)
            asked.request_id = "same"
            told = []
            for key in (one, two, one):
                asking = cluster.stub.Generate(asked, timeout=LIMIT_S, metadata=(*bearer(key), (ASK_KEY, "1")))
                async for _ in asking:
                    pass
                told.append(json.loads(dict(await asking.trailing_metadata())[ANSWER_KEY])["placements"])

            assert [len(placements) for placements in told] == [1, 1, 2]
            assert len((await explained(cluster, "same")).placements) == 3  # the operator sees all

    run(scenario())


def test_the_gateway_measures_how_well_the_first_token_was_predicted(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, policy="cost") as cluster:
            await cluster.ask(request(max_tokens=5))

            page = await metrics(cluster)

            assert "baton_gateway_ttft_prediction_ratio_count 1" in page

    run(scenario())


async def metrics(cluster: FakeCluster) -> str:
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        return (await client.get(f"http://{cluster.gateway.http_address}/metrics")).text


def big_reply(num_pairs: int) -> router_pb2.ExplainReply:
    pairs = [
        router_pb2.ConsideredPair(
            decode_worker_id=f"decode-{number}",
            prefill_worker_id=f"prefill-{number}",
            is_chosen=number == 3,
            total_s=0.1,
            terms=[router_pb2.CostTerm(name=f"term_{i}", seconds=i / 7) for i in range(11)],
        )
        for number in range(num_pairs)
    ]
    placement = router_pb2.PlacementExplanation(request_id="räksmörgås", policy="cost", considered=pairs)
    return router_pb2.ExplainReply(placements=[placement])


@pytest.mark.parametrize(("num_pairs", "told"), [(4, 4), (200, 1)])
def test_the_metadata_stays_within_what_grpc_lets_through(num_pairs: int, told: int) -> None:
    ((key, text),) = explanation_metadata(big_reply(num_pairs))

    assert key == ANSWER_KEY
    assert len(text) < 8000
    assert text.isascii()
    (placement,) = json.loads(text)["placements"]
    assert placement["request_id"] == "räksmörgås"
    assert len(placement["considered"]) == told


@pytest.mark.parametrize(
    ("metadata", "wants"),
    [(None, False), ((), False), (((ASK_KEY, "1"),), True), (((ASK_KEY, "0"),), False), ((("other", "1"),), False)],
)
def test_only_the_key_asks(metadata: Any, wants: bool) -> None:
    assert wants_explanation(metadata) == wants


def test_the_command_shows_what_was_chosen() -> None:
    reply = big_reply(5)
    reply.placements[0].decode_worker_id = "decode-3"
    reply.placements[0].predicted_ttft_s = 0.25

    (shown,) = explanations_json(reply)

    assert [pair["is_chosen"] for pair in shown["considered"]] == [False, False, False, True, False]
    assert shown["observed_ttft"] is None
    assert headline(reply.placements[0]) == (
        "räksmörgås: local prefill -> decode-3, by cost; first token 250 ms after the placement predicted, "
        "not yet observed"
    )
