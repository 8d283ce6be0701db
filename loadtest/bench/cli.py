"""`baton bench`: benchmarks that a user may want to repeat with a model of their own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from cluster.cli import one_line_errors
from cluster.model_store import resolve
from common.config import DEMO_MODEL, ModelConfig
from common.errors import ConfigError
from loadtest.bench import codecs, transfer
from loadtest.bench.common import BenchRow, publish

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(help="Benchmarks.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")
bench.command("transfer")(transfer.main)
bench.command("codecs")(codecs.main)

DIVERGENCE_GOAL = 0.01
AGREEMENT_GOAL = 0.94
"""What the default format must keep."""


@bench.command()
def quality(
    model: Annotated[str, typer.Option(help="As `model.source`: a name, a folder, a .gguf file or a hub id.")] = (
        DEMO_MODEL
    ),
    tokens: Annotated[int | None, typer.Option(min=1, help="How much of the text to read; default: all.")] = None,
) -> None:
    """Compare each weight and KV format with fp32 on a text: KL divergence and how often the same token wins."""
    with one_line_errors():
        folder = resolve(ModelConfig(source=model)).path
        command = [sys.executable, "-m", "engine.quality", str(folder), *([] if tokens is None else [str(tokens)])]
        rows = [row for line in _lines(command) for row in _rows(line)]
        publish("quality", rows)


def _rows(score: dict[str, Any]) -> Iterator[BenchRow]:
    if "tokens" in score:
        typer.echo(f"{score['tokens']} tokens; fp32 by the reference backend first", err=True)
        return
    name = f"{score['weights']} weights, KV in {score['kv_dtype']}"
    if score["weights"] == "q4":
        name += f", activations in {score['activations']}"
    divergence, agreement = score["divergence"], score["agreement"]
    yield BenchRow(f"{name}: KL to fp32", divergence, "nats/token", False, goal=DIVERGENCE_GOAL)
    yield BenchRow(f"{name}: same token", agreement, "of 1", True, goal=AGREEMENT_GOAL)


def _lines(command: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines that a process writes.

    Raises:
        ConfigError: it failed; the message is the last line that it had to say.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield json.loads(line)
        complaint = process.stderr.read().strip().splitlines()
    if process.returncode:
        raise ConfigError(complaint[-1] if complaint else f"it ended with code {process.returncode}")
