"""Calls between the processes of one cluster carry its secret; others are refused, as are bytes that are no message."""

# ruff: noqa: N802 - the protocol's names

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_pb.v1 import router_pb2, router_pb2_grpc
from common import peers
from common.config_doors import SecurityConfig
from common.errors import ConfigError, InvalidRequestError, UnauthenticatedError
from common.rpc import Health, bind, make_server, open_channel
from common.status import error_from_rpc

SECRET = "s" * 32
LIMIT_S = 10.0


class _Service(router_pb2_grpc.RouterServicer):
    """One method that takes a message, one that takes a stream."""

    async def GetRouterStatus(self, request: Any, context: Any) -> router_pb2.RouterStatus:
        return router_pb2.RouterStatus(policy="mine")

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        async for command in request_iterator:
            await context.write(router_pb2.RouterReply(reservation_id=command.attach.gateway_id))

    async def SetWorkers(self, request: Any, context: Any) -> router_pb2.SetWorkersReply:
        return router_pb2.SetWorkersReply()

    async def Explain(self, request: Any, context: Any) -> router_pb2.ExplainReply:
        return router_pb2.ExplainReply()


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    peers.set_up(peers.Peers())


@asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    server = make_server()
    router_pb2_grpc.add_RouterServicer_to_server(_Service(), server)
    health = Health(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    await health.set_serving(True, [""])
    try:
        yield address
    finally:
        await server.stop(None)


async def _status(channel: grpc.aio.Channel) -> str:
    reply = await router_pb2_grpc.RouterStub(channel).GetRouterStatus(
        router_pb2.GetRouterStatusRequest(), timeout=LIMIT_S
    )
    return reply.policy


def test_a_peer_with_the_secret_is_served_by_messages_and_by_streams() -> None:
    async def scenario() -> None:
        peers.set_up(peers.Peers(SECRET))
        async with _serving() as address, open_channel(address) as channel:
            assert await _status(channel) == "mine"
            stub: Any = router_pb2_grpc.RouterStub(channel)
            attach = router_pb2.RouterCommand(attach=router_pb2.RouterAttach(gateway_id="g"))
            replies = stub.Session(iter([attach, attach]), timeout=LIMIT_S)
            assert [reply.reservation_id async for reply in replies] == ["g", "g"]

    asyncio.run(scenario())


@pytest.mark.parametrize("shown", ["", "t" * 32, "s" * 31])
def test_without_the_clusters_secret_every_call_but_a_health_check_is_refused(shown: str) -> None:
    async def scenario() -> None:
        peers.set_up(peers.Peers(shown))
        async with _serving() as address, open_channel(address) as channel:
            peers.set_up(peers.Peers(SECRET))  # what the server asks for
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await _status(channel)
            assert isinstance(error_from_rpc(raised.value), UnauthenticatedError)
            stub: Any = router_pb2_grpc.RouterStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Session(iter([]), timeout=LIMIT_S).read()
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert SECRET not in str(raised.value)
            check = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(channel).Check(check, timeout=LIMIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(scenario())


def test_bytes_that_are_no_message_are_the_callers_mistake_and_leave_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with _serving() as address, grpc.aio.insecure_channel(address) as channel:
            wrong: Any = channel
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await wrong.unary_unary("/baton.v1.Router/GetRouterStatus")(b"\xff\xff", timeout=LIMIT_S)
            assert isinstance(error_from_rpc(raised.value), InvalidRequestError)
            call = wrong.stream_stream("/baton.v1.Router/Session")(iter([b"\xff\xff"]), timeout=LIMIT_S)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert isinstance(error_from_rpc(raised.value), InvalidRequestError)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(scenario())

    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_each_cluster_makes_a_secret_of_its_own() -> None:
    made = {peers.load(SecurityConfig()).secret for _ in range(8)}

    assert len(made) == 8
    assert all(len(secret) >= peers.SECRET_CHARACTERS_MIN for secret in made)
    assert not any(secret in repr(peers.Peers(secret)) for secret in made)


def test_a_secret_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")

    assert peers.load(SecurityConfig(secret_file=file)).secret == SECRET


@pytest.mark.parametrize("content", [None, "", "short", "has spaces " * 9, "é" * 40])
def test_a_file_without_a_fit_secret_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content, "utf-8")

    with pytest.raises(ConfigError, match="secret_file"):
        peers.load(SecurityConfig(secret_file=file))
