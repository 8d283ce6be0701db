"""Both clients: whole answers and streams, other gateways and later attempts where that helps, errors as they are."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.asking import Answer, Retries, chat_request, completion_request
from cluster.async_client import AsyncClient
from cluster.client import Client
from cluster.gateway.server import GatewayServer
from common.config_doors import GatewayConfig
from common.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    TransferError,
    WorkerLostError,
)
from tests.cluster.fake_cluster import HOST, FakeCluster, fake_cluster, run

QUICK = Retries(first_s=0.01)
NOBODY = "127.0.0.1:1"
Ask = Callable[[str, Any, float | None], Coroutine[Any, Any, Answer]]


async def ask_by_async(address: str, request: Any, timeout_s: float | None = None) -> Answer:
    async with AsyncClient(address, retries=QUICK) as client:
        return await client.ask(request, timeout_s)


async def ask_by_sync(address: str, request: Any, timeout_s: float | None = None) -> Answer:
    def ask() -> Answer:
        with Client(address, retries=QUICK) as client:
            return client.ask(request, timeout_s)

    return await asyncio.to_thread(ask)


both = pytest.mark.parametrize("ask", [ask_by_async, ask_by_sync])


@both
def test_a_question_takes_one_line(model_dir: Path, ask: Ask) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            answer = await ask(cluster.gateway.grpc_address, completion_request([5, 6, 7], {"max_tokens": 4}), None)

            assert answer.token_ids == (5, 6, 7, 5)
            assert answer.finished.usage.output_tokens == 4

    run(scenario())


def test_a_stream_is_read_part_by_part(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, AsyncClient(cluster.gateway.grpc_address) as client:
            parts = [part.text async for part in client.generate(chat_request("hello", {"max_tokens": 5}))]

            assert "".join(parts) == "user\n"
            assert await client.model_id() == "fake"

    run(scenario())


@both
def test_what_has_no_room_yet_or_did_not_arrive_whole_is_asked_again(model_dir: Path, ask: Ask) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, retries_max=0) as cluster:
            cluster.worker("d0").refuse(OverloadedError("full"), TransferError("damaged"))

            answer = await ask(cluster.gateway.grpc_address, completion_request([5], {"max_tokens": 2}), None)

            assert len(answer.token_ids) == 2
            assert len(cluster.worker("d0").started) == 3

    run(scenario())


@both
@pytest.mark.parametrize(
    ("errors", "raised", "attempts"),
    [
        pytest.param([OverloadedError("full")] * 3, OverloadedError, 3, id="attempts have a limit"),
        pytest.param([InvalidRequestError("no")], InvalidRequestError, 1, id="a wrong request stays wrong"),
        pytest.param([BatonError("a bug")], BatonError, 1, id="a bug stays a bug"),
        pytest.param([OverloadedError("full", 60.0)], OverloadedError, 1, id="a wait beyond the deadline"),
    ],
)
def test_what_does_not_help_is_not_tried(
    model_dir: Path, ask: Ask, errors: list[BatonError], raised: type[BatonError], attempts: int
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, retries_max=0) as cluster:
            cluster.worker("d0").refuse(*errors)

            with pytest.raises(raised):
                await ask(cluster.gateway.grpc_address, completion_request([5], {"max_tokens": 2}), 20.0)

            assert len(cluster.worker("d0").started) == attempts

    run(scenario())


def test_a_stream_that_has_begun_is_never_sent_again(model_dir: Path) -> None:
    async def by_async(address: str, begun: asyncio.Event) -> None:
        async with AsyncClient(address, retries=QUICK) as client:
            async for _ in client.generate(completion_request([5], {"max_tokens": 400})):
                begun.set()

    def by_sync(address: str, begun: Callable[[], object]) -> None:
        with Client(address, retries=QUICK) as client:
            for _ in client.generate(completion_request([5], {"max_tokens": 400})):
                begun()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        for is_async in (True, False):
            async with fake_cluster(model_dir, num_prefill=0, num_decode=2, retries_max=0) as cluster:
                begun, address = asyncio.Event(), cluster.gateway.grpc_address
                for worker in cluster.workers.values():
                    worker.step_s = 0.02
                asking: asyncio.Future[None] = asyncio.ensure_future(
                    by_async(address, begun)
                    if is_async
                    else asyncio.to_thread(by_sync, address, partial(loop.call_soon_threadsafe, begun.set))
                )
                await begun.wait()
                [running] = [worker for worker in cluster.workers.values() if worker.num_running]
                await running.kill()

                with pytest.raises(WorkerLostError, match=r"^decode worker d\d was lost"):
                    await asking

                assert sum(len(worker.started) for worker in cluster.workers.values()) == 1

    run(scenario())


@both
def test_the_deadline_holds_over_all_attempts(model_dir: Path, ask: Ask) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            cluster.worker("d0").may_step.clear()

            with pytest.raises(DeadlineError):
                await ask(cluster.gateway.grpc_address, completion_request([5]), 0.3)

            cluster.worker("d0").may_step.set()

    run(scenario())


async def second_gateway(cluster: FakeCluster, model_dir: Path) -> GatewayServer:
    config = GatewayConfig(host=HOST, grpc_port=0, http_port=0)
    return await GatewayServer.start(config, model_dir, "fake", cluster.router.address)


def test_two_gateways_share_one_client(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            other = await second_gateway(cluster, model_dir)
            try:
                async with AsyncClient(f"{cluster.gateway.grpc_address},{other.grpc_address}", retries=QUICK) as client:
                    asked = completion_request([5, 6], {"max_tokens": 3})
                    answers = await asyncio.gather(*(client.ask(asked) for _ in range(8)))

                    assert {answer.token_ids for answer in answers} == {(5, 6, 5)}
                    assert cluster.router.status().placements_total == 8
                    assert (await cluster.status()).gateway.requests_total == 4

                    await other.stop()
                    assert [len((await client.ask(asked)).token_ids) for _ in range(4)] == [3] * 4
            finally:
                await other.stop()

    run(scenario())


@both
def test_a_gateway_that_is_away_costs_an_attempt(model_dir: Path, ask: Ask) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            address = f"{NOBODY},{cluster.gateway.grpc_address}"

            assert len((await ask(address, completion_request([5], {"max_tokens": 2}), None)).token_ids) == 2

    run(scenario())


def test_what_a_gateway_failed_goes_to_another_one_however_many_requests_run(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            address, twice = f"{NOBODY},{cluster.gateway.grpc_address}", Retries(attempts=2, first_s=0.01)
            async with AsyncClient(address, retries=twice) as client:
                answers = await asyncio.gather(
                    *(client.ask(completion_request([5], {"max_tokens": 2})) for _ in range(8))
                )

            assert [len(answer.token_ids) for answer in answers] == [2] * 8

    run(scenario())


@both
def test_nobody_there_is_said_in_our_words(ask: Ask) -> None:
    async def scenario() -> None:
        with pytest.raises(WorkerLostError, match=f"nobody listens on {NOBODY}"):
            await ask(NOBODY, completion_request([5]), None)

    run(scenario())


def test_a_gateway_that_goes_in_the_middle_of_an_answer_is_not_taken_for_one_that_never_spoke(
    model_dir: Path,
) -> None:
    async def by_async(address: str, begun: Callable[[], object]) -> None:
        async with AsyncClient(address) as client:
            async for _ in client.generate(completion_request([5], {"max_tokens": 400})):
                begun()

    def by_sync(address: str, begun: Callable[[], object]) -> None:
        with Client(address) as client:
            for _ in client.generate(completion_request([5], {"max_tokens": 400})):
                begun()

    async def relay(near: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
        while data := await near.read(65536):
            far.write(data)
            await far.drain()

    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            cluster.worker("d0").step_s = 0.02
            connections: list[asyncio.StreamWriter] = []

            async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                up, down = await asyncio.open_connection(*cluster.gateway.grpc_address.split(":"))
                connections.extend((writer, down))
                await asyncio.gather(relay(reader, down), relay(up, writer), return_exceptions=True)

            server = await asyncio.start_server(between, HOST, 0)
            address = f"{HOST}:{server.sockets[0].getsockname()[1]}"
            loop, begun = asyncio.get_running_loop(), (asyncio.Event(), asyncio.Event())
            asking = [
                asyncio.create_task(by_async(address, begun[0].set)),
                asyncio.create_task(
                    asyncio.to_thread(by_sync, address, partial(loop.call_soon_threadsafe, begun[1].set))
                ),
            ]
            for event in begun:
                await event.wait()
            server.close()
            for connection in connections:
                connection.transport.abort()

            for error in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(error, WorkerLostError)
                assert error.message == f"the connection to {address} broke in the middle of an answer"

    run(scenario())


def test_what_no_message_can_carry_is_refused_at_once() -> None:
    for sampling in ({"max_tokens": -1}, {"max_tokens": "x"}, {"no_such_field": 1}):
        with pytest.raises(InvalidRequestError):
            completion_request("hi", sampling)
    with pytest.raises(InvalidRequestError):
        chat_request("\ud800")
    with pytest.raises(ConfigError):
        Client("localhost")


def test_waits_grow_and_keep_to_what_the_server_asks_for() -> None:
    retries = Retries(attempts=20, first_s=1.0, most_s=8.0)
    full = OverloadedError("full")

    for attempt, most_s in ((1, 1.0), (2, 2.0), (4, 8.0), (10, 8.0)):
        wait_s = retries.wait_s(attempt, full, None)
        assert wait_s is not None
        assert most_s / 2 <= wait_s <= most_s
    assert retries.wait_s(1, OverloadedError("full", 30.0), None) == 30.0
    assert retries.wait_s(1, OverloadedError("full", 30.0), 29.0) is None
    assert retries.wait_s(20, full, None) is None
