"""The gateway's end of a router session: whatever becomes of a question, nothing stays reserved."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton_pb.v1 import common_pb2, router_pb2, router_pb2_grpc
from cluster.gateway.router_client import RouterClient, Wanted
from cluster.service_level import Priority, ServiceLevel
from common.errors import OverloadedError, WorkerLostError
from common.rpc import bind
from common.status import error_to_pb
from tests.cluster.fake_cluster import HOST, run, until

WANTED = Wanted("r", 10, 5, [], frozenset())


class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Notes the commands that it gets, and answers placements with what the test has put into `answers`."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.holds: list[router_pb2.HoldRequest] = []
        self.places: list[router_pb2.PlaceRequest] = []
        self.answers: asyncio.Queue[router_pb2.RouterReply | None] = asyncio.Queue()
        self._context: Any = None
        self._last = ""

    async def Session(self, request_iterator: AsyncIterator[router_pb2.RouterCommand], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await context.send_initial_metadata(())
        async for command in _one_by_one(request_iterator):
            self.commands.append(command.WhichOneof("command") or "")
            if command.HasField("hold"):
                self.holds.append(command.hold)
            if command.HasField("place"):
                self.places.append(command.place)
                answer = await self.answers.get()
                if answer is None:
                    return
                self._context, self._last = context, command.place.reservation_id
                await self.say(answer)

    async def say(self, reply: router_pb2.RouterReply) -> None:
        """Send something about the last request."""
        reply.reservation_id = self._last
        await self._context.write(reply)


async def _one_by_one(commands: AsyncIterator[router_pb2.RouterCommand]) -> AsyncIterator[router_pb2.RouterCommand]:
    async for command in commands:
        for one in command.batch.commands if command.HasField("batch") else [command]:
            yield one


@asynccontextmanager
async def connected(wait_s: float = 5.0) -> AsyncIterator[tuple[ScriptedRouter, RouterClient]]:
    router, server = ScriptedRouter(), grpc.aio.server()  # type: ignore[abstract]  # the other calls are not used
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    address = bind(server, HOST, 0)
    await server.start()
    changes: list[bool] = []

    async def changed(is_connected: bool) -> None:
        changes.append(is_connected)

    client = RouterClient(address, "g", wait_s, changed)
    task = asyncio.create_task(client.run())
    try:
        await until(lambda: changes == [True], "not connected")
        yield router, client
        assert client.num_reservations == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(None)


def placement() -> router_pb2.RouterReply:
    return router_pb2.RouterReply(placement=router_pb2.WorkerPlacement(decode_worker_id="d0"))


def test_a_reservation_is_released_once() -> None:
    async def scenario() -> None:
        async with connected() as (router, client):
            router.answers.put_nowait(placement())
            reservation = await client.place(WANTED)
            for _ in range(2):
                reservation.first_token()
            for _ in range(2):
                reservation.release()
            reservation.first_token()

            await until(lambda: router.commands[-1] == "release", "not released")
            assert router.commands == ["attach", "place", "first_token", "release"]

    run(scenario())


def test_a_question_that_is_given_up_is_released_when_it_is_answered_after_all() -> None:
    async def scenario() -> None:
        async with connected() as (router, client):
            asked = asyncio.create_task(client.place(WANTED))
            await until(lambda: router.commands == ["attach", "place"], "not asked")

            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            router.answers.put_nowait(placement())

            await until(lambda: router.commands == ["attach", "place", "release"], "not released")

    run(scenario())


def test_a_router_that_does_not_answer_is_unavailable_and_owes_nothing() -> None:
    async def scenario() -> None:
        async with connected(wait_s=0.1) as (router, client):
            with pytest.raises(WorkerLostError, match=r"did not answer for 0\.1 s"):
                await client.place(WANTED)

            router.answers.put_nowait(placement())
            await until(lambda: router.commands == ["attach", "place", "release"], "not released")

    run(scenario())


def test_a_session_that_breaks_before_the_answer_is_asked_again() -> None:
    async def scenario() -> None:
        async with connected() as (router, client):
            router.answers.put_nowait(placement())
            first = await client.place(WANTED)
            router.answers.put_nowait(None)
            router.answers.put_nowait(placement())

            second = await client.place(WANTED)

            assert router.commands == ["attach", "place", "place", "attach", "hold", "place"]
            assert router.holds[0].reservation_id == first.reservation_id
            assert (router.holds[0].decode_worker_id, router.holds[0].num_tokens) == ("d0", 10)
            first.release()
            second.release()

    run(scenario())


def test_the_router_learns_whose_request_it_is_and_how_soon_it_is_wanted() -> None:
    async def scenario() -> None:
        async with connected() as (router, client):
            router.answers.put_nowait(placement())
            level = ServiceLevel(Priority.HIGH, ttft_target_s=0.5)
            wanted = Wanted("r", 10, 5, [], frozenset(), level, "acme", timeout_s=2.0, is_admitted=True)

            (await client.place(wanted)).release()

            asked = router.places[0]
            assert (asked.tenant, asked.priority, asked.timeout_s) == ("acme", common_pb2.PRIORITY_HIGH, 2.0)
            assert (asked.ttft_target_s, asked.HasField("tpot_target_s"), asked.is_admitted) == (0.5, False, True)

    run(scenario())


def test_a_request_that_waits_for_room_is_not_given_up_when_the_router_would_count_as_away() -> None:
    async def scenario() -> None:
        async with connected(wait_s=0.3) as (router, client):
            router.answers.put_nowait(router_pb2.RouterReply(queued=router_pb2.Queued(wait_max_s=60.0)))
            asked = asyncio.create_task(client.place(WANTED))
            await until(lambda: router.commands == ["attach", "place"], "not asked")
            done, _ = await asyncio.wait([asked], timeout=0.6)

            assert not done
            await router.say(placement())
            (await asked).release()

    run(scenario())


def test_the_routers_own_refusal_is_raised_as_it_is() -> None:
    async def scenario() -> None:
        async with connected() as (router, client):
            router.answers.put_nowait(router_pb2.RouterReply(error=error_to_pb(OverloadedError("all are busy", 3.0))))

            with pytest.raises(OverloadedError, match="all are busy") as caught:
                await client.place(WANTED)

            assert caught.value.retry_after_s == 3.0

    run(scenario())
