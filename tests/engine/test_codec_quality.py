"""A codec is measured on the served model, and refused if it changes more than it may."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import EngineConfig, TransferConfig
from common.errors import ConfigError
from engine.codec_bound import CodecBound
from engine.codec_quality import SCORED_TOKENS, Scorer, measure, prose
from engine.codec_report import report
from engine.engine import Engine
from engine.loading import load_parts

SETTINGS: dict[str, Any] = {"backend": "reference", "block_tokens": 16, "pool_blocks": 64}


@pytest.fixture
def model_dir(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def test_exact_copies_change_nothing_and_coarser_ones_more(model_dir: Path) -> None:
    lines = {
        line.codec: line for line in report(model_dir, EngineConfig(**SETTINGS), ["raw", "lossless", "int8", "fp8"])
    }

    for exact in ("raw", "lossless"):
        assert (lines[exact].kl_mean, lines[exact].kl_max) == (0.0, 0.0)
        assert lines[exact].top_agreement == lines[exact].greedy_agreement == 1.0
    assert 0 < lines["int8"].kl_mean < lines["fp8"].kl_mean
    assert lines["int8"].kl_max >= lines["int8"].kl_mean
    assert lines["int8"].num_tokens == 4 * SCORED_TOKENS
    assert lines["int8"].ratio == pytest.approx(4 / (1 + 4 / 128))


def test_a_codec_within_the_bound_is_used_and_one_beyond_is_refused(model_dir: Path) -> None:
    config = EngineConfig(**SETTINGS)
    Engine.load(model_dir, config, "m", CodecBound(frozenset({"int8"}), 10.0)).close()

    with pytest.raises(ConfigError, match=r"codec int8 changes .* more than transfer.codec_kl_max=1e-12"):
        Engine.load(model_dir, config, "m", CodecBound(frozenset({"int8"}), 1e-12))


def test_a_pool_without_room_to_measure_is_an_error(model_dir: Path) -> None:
    config = EngineConfig(**{**SETTINGS, "pool_blocks": 9})

    with pytest.raises(ConfigError, match="no room to measure a codec"):
        Engine.load(model_dir, config, "m", CodecBound(frozenset({"fp8"}), 1.0))


def test_measuring_leaves_the_engine_as_it_was(model_dir: Path) -> None:
    engine = Engine.load(model_dir, EngineConfig(**SETTINGS), "m", CodecBound(frozenset({"int8", "fp8"}), 10.0))

    assert engine.pool.num_used == 0
    engine.pool.check()
    engine.close()


def test_damage_is_seen(model_dir: Path) -> None:
    """The measure measures: zeroed values of a context show."""
    parts = load_parts(model_dir, EngineConfig(**SETTINGS), "m")
    scorer = Scorer(parts.backend, parts.kv, parts.context_tokens)
    tokens = prose(model_dir, parts.backend.facts.vocab_tokens)
    size = scorer.context_tokens_for(len(tokens))
    exact = scorer.prefill(tokens[: size + SCORED_TOKENS], size)
    copy = scorer.prefill(tokens[: size + SCORED_TOKENS], size, "raw")
    assert (scorer.score(exact, 8) == scorer.score(copy, 8)).all()

    first = copy.block_table[0] * parts.kv.layout.block_bytes
    parts.kv.buffer[first : first + parts.kv.layout.block_bytes] = bytes(parts.kv.layout.block_bytes)

    assert (scorer.score(exact, 8) != scorer.score(copy, 8)).any()
    assert measure(scorer, "raw", tokens, num_contexts=2, is_greedy_wanted=False).kl_mean == 0
    parts.backend.close()
    parts.kv.close()


def test_a_model_without_a_tokenizer_is_measured_on_numbers(tmp_path: Path) -> None:
    tokens = prose(tmp_path, 50)

    assert len(tokens) > 300
    assert set(tokens) <= set(range(50))
    assert prose(tmp_path, 50) == tokens


@pytest.mark.parametrize(
    ("engine", "transfer", "codecs"),
    [
        ({}, {}, None),
        ({}, {"codec": "lossless"}, None),
        ({}, {"codec": "int8"}, {"int8"}),
        ({"tier_codec": "int8"}, {}, None),
        ({"tier_codec": "int8", "host_tier_mib": 1}, {"codec": "fp8"}, {"int8", "fp8"}),
        ({"tier_codec": "raw", "disk_tier_mib": 1}, {}, None),
    ],
)
def test_what_is_lossy_and_in_use_is_measured(
    engine: dict[str, Any], transfer: dict[str, Any], codecs: set[str] | None
) -> None:
    bound = CodecBound.of(EngineConfig(**engine), TransferConfig(**transfer))

    assert (None if bound is None else set(bound.codecs)) == codecs
