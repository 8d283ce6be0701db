"""The command line drives a real server and leaves the files that were asked for; errors are one line."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.echo import EchoServer
from loadtest.records import RunFile


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """An echo on a loop of its own; the commands under test run their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(EchoServer.start(), loop).result(10)
    yield server.address
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


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

    result = CliRunner().invoke(app, ["loadtest", "run", echo, "--find-goodput", *arguments, "--json"])

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
