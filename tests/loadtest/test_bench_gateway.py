"""The benchmark's client counts the tokens that were sent, over both kinds of streams, and notices a broken server."""

import asyncio
from collections.abc import Callable

import pytest

from common.errors import WorkerLostError
from loadtest.bench.gateway_load import Face, GrpcFace, Samples, SseFace, run
from loadtest.bench.gateway_rows import LONG, TOKENS_GOAL, Measured, token_rows
from loadtest.echo import EchoServer
from loadtest.echo_http import HttpEcho
from tests.cluster.fake_cluster import until


async def _grpc() -> tuple[Face, Callable[[], object]]:
    server = await EchoServer.start()
    return GrpcFace(server.address), server.stop


async def _sse() -> tuple[Face, Callable[[], object]]:
    server = await HttpEcho.start()
    return SseFace(server.address, "echo"), server.stop


@pytest.mark.parametrize("start", [_grpc, _sse])
def test_all_tokens_of_all_streams_are_counted(start: Callable[[], object]) -> None:
    async def scenario() -> None:
        face, stop = await start()  # type: ignore[misc]
        try:
            samples = await run(face, streams=3, max_tokens=7, seconds=0.1)

            assert len(samples.ttft_s) >= 3
            assert samples.num_tokens == 7 * len(samples.ttft_s)
            assert all(0 < ttft_s < samples.wall_s for ttft_s in samples.ttft_s)
        finally:
            await face.close()
            await stop()

    asyncio.run(scenario())


def test_a_stream_can_be_begun_and_left_alone() -> None:
    async def scenario() -> None:
        server = await HttpEcho.start(tpot_s=3600.0)
        face = SseFace(server.address, "echo")
        try:
            await asyncio.gather(*(face.begin(slot, 400) for slot in range(5)))

            assert len(server.connections) == 5
        finally:
            await face.close()
            await server.stop()

    asyncio.run(scenario())


def test_a_server_that_goes_away_is_an_error() -> None:
    async def scenario() -> None:
        server = await HttpEcho.start(tpot_s=3600.0)
        face = SseFace(server.address, "echo")
        await face.begin(0, 4)
        asking = asyncio.create_task(face.ask(1, 4, Samples()))
        await until(lambda: len(server.connections) == 2, "not connected")
        await server.stop()
        with pytest.raises(WorkerLostError):
            await asking
        await face.close()

    asyncio.run(scenario())


def test_the_goal_of_tokens_over_grpc_holds_at_64_streams_and_at_256() -> None:
    found: dict[str, Measured | str] = {
        name: Measured(Samples([0.001], num_tokens=1000, wall_s=1.0), cpu_s=0.1) for name in ("ours", "direct")
    }

    rows = [row for shape in LONG for row in token_rows("gRPC", shape, found)]

    assert [shape.streams for shape in LONG] == [64, 256]
    assert [(row.ours, row.goal, row.met) for row in rows] == [(10_000.0, TOKENS_GOAL, False)] * 2
