"""Streams on the wire: framing, comments in long waits, failures in the middle, clients that leave or do not read."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from cluster.fake_worker import FakeModel
from common.errors import BatonError
from tests.cluster.fake_cluster import fake_cluster, run, start_again, until, within_a_second
from tests.cluster.gateway.http.wire import Response, event, post, request_bytes, wire

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
STREAM = {**CHAT, "stream": True}
PATH = "/v1/chat/completions"


def test_events_are_data_lines_ended_by_done(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            connection.send(PATH, STREAM, x_request_id="mine-7")
            status, headers = await connection.head()
            events = await connection.rest()

            assert status == 200
            assert headers["content-type"] == "text/event-stream; charset=utf-8"
            assert headers["x-request-id"] == "mine-7"
            assert "date" in headers
            assert events[-1] == "data: [DONE]"
            assert {event(text)["id"] for text in events[:-1]} == {"chatcmpl-mine-7"}
            assert event(events[0])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "usage" not in event(events[0])
            connection.send("/health", method="GET")
            assert (await connection.response()).status == 200  # the connection can be used again

    run(scenario())


def test_the_first_token_is_flushed_at_once_and_with_the_role(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster, wire(cluster) as connection:
            worker = cluster.worker("d0")
            worker.step_s = 0.05
            connection.send("/v1/completions", {"prompt": "hello", "max_tokens": 400, "stream": True})
            await connection.head()

            first = await connection.chunk()
            worker.may_step.clear()

            assert event(first.decode().split("\n\n")[0])["choices"][0]["text"] == "he"
            connection.cut()
            await until(lambda: worker.num_running == 0, "still running")
            worker.may_step.set()

    run(scenario())


def test_a_long_wait_is_bridged_by_comments(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"keepalive_s": 0.05}) as cluster, wire(cluster) as connection:
            cluster.worker("d0").may_step.clear()
            connection.send(PATH, STREAM)
            await connection.head()

            waited = [await connection.chunk() for _ in range(3)]
            cluster.worker("d0").may_step.set()
            events = await connection.rest()

            assert waited == [b": still waiting\n\n"] * 3
            assert events[-1] == "data: [DONE]"
            assert event(events[-2])["choices"][0]["finish_reason"] == "length"

    run(scenario())


def test_a_failure_after_the_beginning_is_an_event_and_then_the_end(model_dir: Path) -> None:
    async def scenario() -> None:
        settings: dict[str, Any] = {"http": {"keepalive_s": 0.05}, "retries_max": 0}
        async with fake_cluster(model_dir, num_prefill=0, **settings) as cluster, wire(cluster) as connection:
            cluster.worker("d0").may_step.clear()
            connection.send(PATH, STREAM)
            assert (await connection.head())[0] == 200

            await cluster.worker("d0").kill()
            *_, error, done = await connection.rest()

            assert event(error)["error"]["type"] == "service_unavailable_error"
            assert "d0" in event(error)["error"]["message"]
            assert done == "data: [DONE]"

    run(scenario())


def test_a_worker_killed_after_its_first_token_is_an_event_and_then_the_end(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster, wire(cluster) as connection:
            cluster.worker("d0").step_s = 3600.0  # which the first token does not wait for
            connection.send("/v1/completions", {"prompt": "hello", "max_tokens": 4, "stream": True})
            assert (await connection.head())[0] == 200
            first = (await connection.chunk()).decode()

            await cluster.worker("d0").kill()
            error, done = await connection.rest()

            assert event(first.removesuffix("\n\n"))["choices"][0]["text"] == "he"
            assert event(error)["error"]["type"] == "service_unavailable_error"
            assert done == "data: [DONE]"

    run(scenario())


def test_one_choice_that_fails_ends_the_others(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0) as cluster:
            cluster.worker("d0").step_s = 0.01
            cluster.worker("d0").refuse(BatonError("broken"))

            answer = await post(cluster, PATH, {**CHAT, "n": 3, "max_tokens": 400})

            assert (answer.status, answer.error["message"]) == (500, "broken")
            await until(lambda: cluster.worker("d0").num_running == 0, "still running")

    run(scenario())


@pytest.mark.parametrize("body", [CHAT, STREAM, {**STREAM, "n": 2}], ids=["whole", "stream", "two"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_client_that_leaves_frees_everything(model_dir: Path, body: dict[str, Any], stage: str) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            stuck = cluster.worker("p0" if stage == "prefill" else "d0")
            stuck.may_step.clear()
            connection.send(PATH, body)
            await until(lambda: len(cluster.worker("d0").started) == body.get("n", 1), "not started")

            connection.cut()

            await within_a_second(lambda: cluster.worker("d0").num_running == 0, "still running")
            await within_a_second(lambda: cluster.router.status().reservations == 0, "reservations are left")
            stuck.may_step.set()

    run(scenario())


@pytest.mark.parametrize("body", [CHAT, STREAM, {**STREAM, "n": 2}], ids=["whole", "stream", "two"])
def test_a_client_that_leaves_while_it_waits_for_a_worker_frees_its_place(
    model_dir: Path, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, model=FakeModel(running_max=1)) as cluster, wire(cluster) as connection:
            cluster.worker("d0").may_step.clear()
            others = [asyncio.create_task(post(cluster, PATH, CHAT)) for _ in range(2)]
            await until(lambda: cluster.router.status().reservations == 2, "not placed")
            connection.send(PATH, body)
            await until(lambda: cluster.router.status().queued == body.get("n", 1), "does not wait")

            connection.cut()

            await within_a_second(lambda: cluster.router.status().queued == 0, "still waits")
            await within_a_second(lambda: cluster.gateway._counts.running == 2, "still counted")
            cluster.worker("d0").may_step.set()
            assert [(await other).status for other in others] == [200] * 2
            assert len(cluster.worker("d0").started) == 2

    run(scenario())


def test_a_client_that_does_not_read_is_cut_off_and_disturbs_nobody(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_prefill=0, http={"unread_s": 0.3}) as cluster:
            host, _, port = cluster.gateway.http_address.rpartition(":")
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
            # More than the kernel buffers, even on a machine so slow that the tokens of many steps share an event.
            body = {"prompt": ["hello"] * 6, "n": 4, "max_tokens": 480, "stream": True, "logprobs": 10}
            await asyncio.get_running_loop().sock_sendall(deaf, request_bytes("/v1/completions", body))
            await until(lambda: len(cluster.worker("d0").started) == 24, "not started")

            answer = await post(cluster, PATH, CHAT)

            assert answer.status == 200
            # Not when the last token has come: a client that reads from then on would still get its answer.
            await until(lambda: cluster.gateway._metrics.http_responses["/v1/completions", 200] == 1, "not cut off")
            assert (await cluster.status()).gateway.running_requests == 0
            # The connection is reset: nothing of the answer is kept for it, not even by the kernel.
            with deaf, pytest.raises(ConnectionResetError):
                await _all_of(deaf)

    run(scenario())


def test_a_gateway_that_stops_tells_its_streams(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, http={"keepalive_s": 0.05}) as cluster, wire(cluster) as begun:
            async with wire(cluster) as waiting:
                cluster.worker("d0").may_step.clear()
                begun.send(PATH, STREAM)
                waiting.send(PATH, CHAT)
                await begun.head()
                await until(lambda: len(cluster.worker("d0").started) == 2, "not started")

                await cluster.gateway.stop()

                *_, error, done = await begun.rest()
                answer: Response = await waiting.response()
                assert event(error)["error"]["message"] == "the gateway stops"
                assert done == "data: [DONE]"
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert await begun.is_closed()
            cluster.worker("d0").may_step.set()
            await start_again(cluster, model_dir)

    run(scenario())


def test_a_gateway_that_stops_lets_requests_finish_in_their_time(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster) as connection:
            cluster.worker("d0").may_step.clear()
            connection.send(PATH, CHAT)
            await until(lambda: len(cluster.worker("d0").started) == 1, "not started")

            stopping = asyncio.create_task(cluster.gateway.stop(5.0))
            await asyncio.sleep(0)
            cluster.worker("d0").may_step.set()
            answer = await connection.response()
            await stopping

            assert answer.json["choices"][0]["finish_reason"] == "length"
            await start_again(cluster, model_dir)

    run(scenario())


async def _all_of(deaf: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(deaf, 1 << 20):
        pass


def test_small_events_are_not_held_back_by_the_kernel(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster, wire(cluster):
            hosting = cluster.gateway._http._hosting
            assert hosting is not None
            await until(lambda: hosting.num_connections == 1, "not connected")
            [connection] = hosting._state.connections
            accepted = connection.transport.get_extra_info("socket")

            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(scenario())
