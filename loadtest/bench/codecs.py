"""`make bench-codecs`: what each codec of KV does to the demo model's answers and to bytes, and what it costs."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import typer

from cluster.cli import one_line_errors
from cluster.model_store import prepare
from common.config import TransferConfig
from common.config_file import load
from common.errors import ConfigError
from loadtest.bench.common import BenchRow, publish

TIMEOUT_S = 900.0
CODECS = [name for name in get_args(TransferConfig.model_fields["codec"].annotation) if name != "auto"]
KL_GOAL = load(None, []).transfer.codec_kl_max
MB = 1e6


def main(
    settings: Annotated[list[str], typer.Option("--set", help="A setting of the engine, engine.b=c.")] = [],  # noqa: B006
    codecs: Annotated[str, typer.Option(help="Which.")] = "lossless,int8,fp8",
) -> None:
    """Measure codecs on the configured model: KL divergence of next tokens, greedy agreement, size, rates of a core."""
    with one_line_errors():
        for name in codecs.split(","):
            if name not in CODECS:
                raise ConfigError(f"--codecs {name!r} is none of {', '.join(CODECS)}")
        publish("codecs", asyncio.run(_rows(settings, codecs)))


async def _rows(settings: Sequence[str], codecs: str) -> list[BenchRow]:
    config = load(None, ["engine.pool_mib=128", *settings])
    model = await prepare(config.model, lambda *_: None)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine.codec_report", str(model.path)),
        *("--engine", config.engine.model_dump_json(), "--codecs", codecs),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ConfigError("the codecs could not be measured; the reason is above")
    *lines, last = [json.loads(line) for line in output.splitlines()]
    rows = [row for line in lines for row in _codec_rows(line)]
    return [*rows, BenchRow("seal (AES-256-GCM), one core", last["seal_bytes_per_s"] / MB, "MB/s", True)]


def _codec_rows(line: dict[str, Any]) -> list[BenchRow]:
    name = line["codec"]
    same = f"same likeliest {line['top_agreement']:.1%}"
    tokens = f"{line['num_tokens']} tokens of prose; largest {line['kl_max']:.2g}, {same}"
    return [
        BenchRow(f"{name}: mean KL of next tokens", line["kl_mean"], "nats", False, goal=KL_GOAL, note=tokens),
        BenchRow(f"{name}: greedy tokens equal to raw, of 64", 100 * line["greedy_agreement"], "%", True),
        BenchRow(f"{name}: bytes, raw / coded", line["ratio"], "x", True),
        BenchRow(f"{name}: encode, one core", line["encode_bytes_per_s"] / MB, "MB/s", True),
        BenchRow(f"{name}: decode, one core", line["decode_bytes_per_s"] / MB, "MB/s", True),
    ]
