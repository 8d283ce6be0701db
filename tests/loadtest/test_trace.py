"""Traces are read as they are, and scaled without changing who shares what with whom."""

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain_hash import chain_hashes
from common.errors import ConfigError
from loadtest.content import token_ids
from loadtest.trace import (
    AzureRow,
    MooncakeRow,
    fit_azure,
    fit_mooncake,
    read_azure,
    read_mooncake,
    read_prompts,
)

GRANULARITY = 16
VOCAB = 49_152


def num_shared(a: Sequence[object], b: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@st.composite
def mooncake_rows(draw: st.DrawFn) -> list[MooncakeRow]:
    """Rows whose block ids form a tree, as a real trace's do: an id names a block and all before it."""
    rows, paths = [], [tuple[int, ...]()]
    for number in range(draw(st.integers(2, 5))):
        known = draw(st.sampled_from(paths))
        path = known + tuple(1000 * number + i for i in range(draw(st.integers(0 if known else 1, 6))))
        paths += [path[:length] for length in range(1, len(path) + 1)]
        tail = draw(st.integers(1, 512))
        rows.append(MooncakeRow(0.0, 512 * (len(path) - 1) + tail, draw(st.integers(1, 2000)), path))
    return rows


@given(mooncake_rows(), st.integers(0, 3))
def test_scaling_keeps_the_sharing_of_prefixes_exactly(rows: list[MooncakeRow], seed: int) -> None:
    scale = fit_mooncake(rows, window=4096, granularity=GRANULARITY)
    prompts = [token_ids(scale.prompt(row, seed), VOCAB) for row in rows]

    for first, a in zip(rows, prompts, strict=True):
        for second, b in zip(rows, prompts, strict=True):
            common = num_shared(first.block_ids, second.block_ids)
            whole = [common < len(row.block_ids) or row.input_tokens % 512 == 0 for row in (first, second)]
            expected = common * scale.tokens_per_block
            if not all(whole):  # the last common block is partial in one of them
                expected = min(expected, len(a), len(b))
            assert num_shared(*(chain_hashes(prompt, GRANULARITY) for prompt in (a, b))) == expected // GRANULARITY
            assert num_shared(a, b) >= expected


@given(mooncake_rows(), st.integers(600, 20_000))
def test_every_scaled_row_fits_and_the_next_larger_scale_does_not(rows: list[MooncakeRow], window: int) -> None:
    scale = fit_mooncake(rows, window, GRANULARITY)

    assert all(scale.total_tokens(row) <= window for row in rows)
    for row in rows:
        assert scale.prompt(row, 0).num_tokens + scale.output_tokens(row) == scale.total_tokens(row)
    if scale.tokens_per_block < 512:
        larger = type(scale)(scale.tokens_per_block + GRANULARITY)
        assert any(larger.total_tokens(row) > window for row in rows)


def test_a_window_too_small_for_any_scale_is_refused_with_both_numbers() -> None:
    rows = [MooncakeRow(0, 512 * 100, 10, tuple(range(100)))]

    with pytest.raises(ConfigError, match=r"51210 tokens.*window of 256"):
        fit_mooncake(rows, 256, GRANULARITY)


def test_a_mooncake_line_is_read_with_its_time_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]}
    path.write_text(json.dumps(line) + "\n\n")

    assert read_mooncake(path) == [MooncakeRow(27.0, 600, 5, (0, 9))]


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0]}',
        "[]",
        "nonsense",
    ],
    ids=["missing", "wrong number of blocks", "no object", "no JSON"],
)
def test_a_bad_mooncake_line_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)

    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_mooncake(path)


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9305900,396,109\r\n"
    )

    assert read_azure(path) == [AzureRow(0.0, 374, 44), AzureRow(4.25, 396, 109)]


@pytest.mark.parametrize("line", ["yesterday,1,2", "2023-11-16 18:15:46.68,many,2", "2023-11-16 18:15:46.68"])
def test_a_bad_azure_line_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n")

    with pytest.raises(ConfigError, match="line 2"):
        read_azure(path)


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 5000)), min_size=1), st.integers(64, 10_000))
def test_azure_lengths_shrink_only_when_they_must(lengths: list[tuple[int, int]], window: int) -> None:
    rows = [AzureRow(0.0, *pair) for pair in lengths]
    longest = max(sum(pair) for pair in lengths)

    factor = fit_azure(rows, window)

    assert longest * factor <= window
    assert (factor == 1) == (longest <= window)


def test_prompt_lines_are_texts_or_chats(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "Hello", "output_tokens": 3}\n{"messages": [{"role": "user", "content": "Hi"}], "at_s": 1.5}\n'
    )

    text, chat = read_prompts(path)

    assert (text.text, text.output_tokens, text.at_s) == ("Hello", 3, None)
    assert (chat.text, chat.messages, chat.at_s) == (None, (("user", "Hi"),), 1.5)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path / "absent.jsonl")
