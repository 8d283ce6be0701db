"""Recorded workloads: Mooncake JSONL, Azure CSV, and JSONL files of prompts; and the rule that fits them to a model.

Scaling rule. Everything shrinks by one factor, so that the structure stays: a Mooncake block of 512 tokens becomes
`tokens_per_block` tokens (at most 512, a multiple of `granularity`, the largest with which every request fits the
window), a partial last block and the output lengths shrink by `tokens_per_block / 512`, rounded up. Two requests that
share k leading blocks in the trace share exactly k * tokens_per_block leading tokens. An Azure trace knows no blocks:
prompts and outputs are multiplied by `window / longest` where the longest does not fit.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from loadtest.content import Segment, TokenPrompt, content_id

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MooncakeRow:
    """One request of a Mooncake trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """One id for each block of 512 tokens, the partial last one included."""


@dataclass(frozen=True, slots=True)
class AzureRow:
    """One request of an Azure trace."""

    at_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One line of a prompt file: a text, or a chat."""

    text: str | None
    messages: tuple[tuple[str, str], ...]
    output_tokens: int | None
    at_s: float | None


def read_mooncake(path: Path) -> list[MooncakeRow]:
    """Read `timestamp` (ms), `input_length`, `output_length`, `hash_ids` from each line.

    Raises:
        ConfigError: the file cannot be read, or a line is not such a request; names the line.
    """
    rows = []
    for number, line in _json_lines(path):
        try:
            row = MooncakeRow(
                at_s=float(line["timestamp"]) / 1000,
                input_tokens=int(line["input_length"]),
                output_tokens=int(line["output_length"]),
                block_ids=tuple(int(block) for block in line["hash_ids"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not a Mooncake request: {error!r}") from error
        if len(row.block_ids) != -(-row.input_tokens // MOONCAKE_BLOCK_TOKENS) or not row.block_ids:
            raise ConfigError(
                f"{path}, line {number}: {row.input_tokens} tokens do not fill {len(row.block_ids)} blocks of 512"
            )
        rows.append(row)
    return rows


def read_azure(path: Path) -> list[AzureRow]:
    """Read `TIMESTAMP,ContextTokens,GeneratedTokens`; times count from the first row.

    Raises:
        ConfigError: the file cannot be read, or a line is not such a request; names the line.
    """
    rows: list[AzureRow] = []
    first: datetime | None = None
    try:
        with path.open(newline="") as file:
            for number, line in enumerate(csv.DictReader(file), start=2):
                try:
                    # Python keeps microseconds; the trace has a seventh digit.
                    at = datetime.fromisoformat(line["TIMESTAMP"].strip()[:26])
                    first = first or at
                    seconds = (at - first).total_seconds()
                    rows.append(AzureRow(seconds, int(line["ContextTokens"]), int(line["GeneratedTokens"])))
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise ConfigError(f"{path}, line {number}: not an Azure request: {error!r}") from error
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error}") from error
    return rows


def read_prompts(path: Path) -> list[PromptRow]:
    """Read lines with `prompt` (a text) or `messages` (a chat), and optionally `output_tokens` and `at_s`.

    Raises:
        ConfigError: the file cannot be read, or a line is not such a request; names the line.
    """
    rows = []
    for number, line in _json_lines(path):
        try:
            messages = tuple((str(item["role"]), str(item["content"])) for item in line.get("messages", ()))
            text = None if messages else str(line["prompt"])
            output = line.get("output_tokens")
            at = line.get("at_s")
            rows.append(
                PromptRow(text, messages, None if output is None else int(output), None if at is None else float(at))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: needs `prompt` or `messages`: {error!r}") from error
    return rows


@dataclass(frozen=True, slots=True)
class MooncakeScale:
    """How a Mooncake trace is fitted to a window."""

    tokens_per_block: int

    def prompt(self, row: MooncakeRow, seed: int) -> TokenPrompt:
        """Return the row's prompt: one segment for each block, named by the block's id."""
        size = self.tokens_per_block
        last = row.input_tokens - MOONCAKE_BLOCK_TOKENS * (len(row.block_ids) - 1)
        sizes = [size] * (len(row.block_ids) - 1) + [_scaled(last, size)]
        return TokenPrompt(
            tuple(
                Segment(content_id("mooncake", seed, block), count)
                for block, count in zip(row.block_ids, sizes, strict=True)
            )
        )

    def output_tokens(self, row: MooncakeRow) -> int:
        """Return the row's output length, at least 1."""
        return max(1, _scaled(row.output_tokens, self.tokens_per_block))

    def total_tokens(self, row: MooncakeRow) -> int:
        """Return tokens of prompt and output together."""
        last = row.input_tokens - MOONCAKE_BLOCK_TOKENS * (len(row.block_ids) - 1)
        prompt = (len(row.block_ids) - 1) * self.tokens_per_block + _scaled(last, self.tokens_per_block)
        return prompt + self.output_tokens(row)


def fit_mooncake(rows: list[MooncakeRow], window: int, granularity: int) -> MooncakeScale:
    """Return the largest scale with which every row fits `window` tokens.

    Raises:
        ConfigError: not even `granularity` tokens for each block fit.
    """
    for size in range(MOONCAKE_BLOCK_TOKENS // granularity * granularity, 0, -granularity):
        scale = MooncakeScale(size)
        if all(scale.total_tokens(row) <= window for row in rows):
            return scale
    longest = max(row.input_tokens + row.output_tokens for row in rows)
    raise ConfigError(
        f"the longest request has {longest} tokens: even {granularity} tokens for each block of 512 do not fit a "
        f"window of {window}; leave out long ones with longest=TOKENS, or lower granularity"
    )


def fit_azure(rows: list[AzureRow], window: int) -> float:
    """Return the factor, at most 1, by which lengths are multiplied so that every row fits `window` tokens."""
    longest = max((row.input_tokens + row.output_tokens for row in rows), default=1)
    # Two roundings up may each add one token.
    return 1.0 if longest <= window else max(1, window - 2) / longest


def _scaled(tokens: int, size: int) -> int:
    return -(-tokens * size // MOONCAKE_BLOCK_TOKENS)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open() as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ConfigError(f"{path}, line {number}: want an object, got {type(line).__name__}")
                yield number, line
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
