"""The command line drives a real server and leaves the files that were asked for; errors are one line."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import typer
from typer.testing import CliRunner

from baton_pb.v1 import inference_pb2_grpc
from common.rpc import bind
from loadtest.bench.cli import app as bench_app
from loadtest.cli import app
from loadtest.echo import EchoServer, EchoService, EchoTimes
from loadtest.records import RunFile


@pytest.fixture(scope="module")
def background() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop for servers; the commands under test run their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="module")
def echo(background: asyncio.AbstractEventLoop) -> Iterator[str]:
    server = asyncio.run_coroutine_threadsafe(EchoServer.start(), background).result(10)
    yield server.address
    asyncio.run_coroutine_threadsafe(server.stop(), background).result(10)


class StallingEcho(EchoService):
    """Answers `answered` requests and keeps all others waiting; `stalled` is set when `users` of them wait."""

    def __init__(self, answered: int, users: int) -> None:
        super().__init__(EchoTimes())
        self.stalled = threading.Event()
        self._answered, self._users = answered, users
        self._count = 0

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._count += 1
        if self._count > self._answered:
            if self._count == self._answered + self._users:
                self.stalled.set()
            await asyncio.Event().wait()
        async for response in super().Generate(request, context):
            yield response


@pytest.fixture
def stalling(background: asyncio.AbstractEventLoop) -> Iterator[tuple[str, StallingEcho]]:
    """An echo that stops answering after five requests, when two wait."""

    async def start() -> tuple[grpc.aio.Server, str, StallingEcho]:
        server, service = grpc.aio.server(), StallingEcho(5, 2)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
        address = bind(server, "127.0.0.1", 0)
        await server.start()
        return server, address, service

    server, address, service = asyncio.run_coroutine_threadsafe(start(), background).result(10)
    yield address, service
    asyncio.run_coroutine_threadsafe(server.stop(None), background).result(10)


def test_a_run_leaves_json_and_a_page(echo: str, tmp_path: Path) -> None:
    output, report = tmp_path / "run.json", tmp_path / "run.html"
    arguments = ["-w", "conversation:turns=2,output_tokens=3", "-a", "closed:users=2", "-n", "3"]

    result = CliRunner().invoke(
        app, ["loadtest", "run", echo, *arguments, "-o", str(output), "-r", str(report), "--json"]
    )

    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["requests"], summary["completed"], summary["errors"]) == (6, 6, {})
    run = RunFile.load(output)
    assert len(run.records) == 6
    assert run.meta["workload"] == "conversation:turns=2,output_tokens=3"
    assert report.read_text().startswith("<!doctype html>")


def test_ctrl_c_leaves_what_was_measured(stalling: tuple[str, StallingEcho], tmp_path: Path) -> None:
    address, service = stalling
    output, report = tmp_path / "partial.json", tmp_path / "partial.html"
    files = ["-o", str(output), "-r", str(report)]
    command = [sys.executable, "-m", "loadtest.cli", "loadtest", "run", address, "-a", "closed:users=2", *files]

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert service.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 130, said
    run = RunFile.load(output)
    assert (len(run.records), run.meta["interrupted"], run.meta["unfinished"]) == (5, True, 2)
    assert run.summary["completed"] == 5
    assert report.exists()


@pytest.mark.parametrize("face", [[], ["--http"]], ids=["gRPC", "HTTP"])
def test_the_clients_own_capacity_is_measured_against_an_echo(face: list[str]) -> None:
    sizes = ["--duration", "0.3", "--prompt-tokens", "8", "--output-tokens", "3"]

    as_json = CliRunner().invoke(app, ["loadtest", "capacity", *sizes, *face, "--json"])
    as_text = CliRunner().invoke(app, ["loadtest", "capacity", *sizes, *face])

    assert as_json.exit_code == 0, as_json.output
    reached = json.loads(as_json.stdout)
    assert (reached["prompt_tokens"], reached["output_tokens"], reached["errors"]) == (8, 3, 0)
    assert reached["requests_per_s"] > 0
    assert reached["tokens_per_s"] == pytest.approx(3 * reached["requests_per_s"])
    assert re.fullmatch(
        r"\d+ requests/s, \d+ tokens/s \(8 prompt tokens, 3 messages each, 0 errors\)\n", as_text.stdout
    )


def test_a_search_and_a_run_take_the_same_options() -> None:
    commands = typer.main.get_command(app).commands["loadtest"].commands  # type: ignore[attr-defined]  # click's, untyped

    assert [p.opts for p in commands["run"].params] == [p.opts for p in commands["find-goodput"].params]


def test_two_runs_are_compared(echo: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    for path in paths:
        CliRunner().invoke(
            app, ["loadtest", "run", echo, "-a", "closed:users=1", "-n", "2", "-o", path], catch_exceptions=False
        )

    as_table = CliRunner().invoke(app, ["loadtest", "compare", *paths, "-r", str(tmp_path / "c.html")])
    as_json = CliRunner().invoke(app, ["loadtest", "compare", *paths, "--json"])

    assert as_table.exit_code == 0, as_table.output
    assert "TTFT ms p99" in as_table.output
    assert set(json.loads(as_json.stdout)) == {"a", "b"}
    assert (tmp_path / "c.html").exists()


def test_a_goodput_search_shows_its_rate_and_points(echo: str) -> None:
    arguments = [
        "-w",
        "synthetic:prompt_tokens=8,output_tokens=2",
        "-n",
        "3",
        "--first-rate",
        "2000",
        "--slo-ttft",
        "0",
    ]

    result = CliRunner().invoke(app, ["loadtest", "find-goodput", echo, *arguments, "--json"])

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["best_rate"] == 0
    assert len(found["points"]) == 7


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-w", "synthetic:colour=red"], 2, "colour"),
        (["-a", "trace"], 2, "timestamps"),
        (["--find-goodput", "-a", "closed:users=1"], 2, "rate to search"),
        (["-w", "mooncake:path=/absent"], 2, "/absent"),
    ],
)
def test_a_set_up_error_is_one_line(echo: str, arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["loadtest", "run", echo, *arguments])

    assert result.exit_code == code
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.parametrize(
    ("name", "option", "value", "words"),
    [
        ("transfer", "--only", "carrier pigeon", "'carrier pigeon' begins none of the means: memcpy in one process; "),
        ("transfer", "--work", "nothing", "'nothing' is none of demo, 8b,"),
        ("codecs", "--codecs", "int8,morse", "--codecs 'morse' is none of raw, lossless, int8, fp8"),
        ("codecs", "--codecs", "", "--codecs '' is none of raw, lossless, int8, fp8"),
        ("codecs", "--set", "engine.colour=red", "engine.colour"),
    ],
)
def test_a_benchmark_of_nothing_is_refused_with_what_there_is(name: str, option: str, value: str, words: str) -> None:
    done = CliRunner().invoke(bench_app, ["bench", name, option, value])

    assert done.exit_code == 2
    assert words in done.stderr
