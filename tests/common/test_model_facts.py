"""What a checkpoint says is read as it is, and what it does not say is named with its file."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.model_facts import ModelFacts

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "eos_token_id": 2,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_the_facts_are_read(tmp_path: Path) -> None:
    facts = ModelFacts.load(write(tmp_path))

    assert facts == ModelFacts("llama", 8192, 49152, frozenset({2}), 30, 3, 64)


@pytest.mark.parametrize(
    ("generation", "config_eos", "expected"),
    [
        pytest.param({"eos_token_id": [2, 5]}, 2, {2, 5}, id="generation config wins"),
        pytest.param({}, 7, {7}, id="generation config is silent"),
        pytest.param(None, [7, 8], {7, 8}, id="no generation config"),
        pytest.param(None, ..., set(), id="nobody says"),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, Any] | None, config_eos: Any, expected: set[int]
) -> None:
    facts = ModelFacts.load(write(tmp_path, generation, eos_token_id=config_eos))

    assert facts.eos_token_ids == expected


def test_missing_heads_and_sizes_follow_from_the_others(tmp_path: Path) -> None:
    facts = ModelFacts.load(write(tmp_path, num_key_value_heads=..., head_dim=None))

    assert facts.num_kv_heads == 9
    assert facts.head_dim == 64


def test_a_stated_head_size_wins(tmp_path: Path) -> None:
    assert ModelFacts.load(write(tmp_path, head_dim=256)).head_dim == 256


def test_the_language_model_of_a_larger_checkpoint_is_read(tmp_path: Path) -> None:
    section = {name: value for name, value in CONFIG.items() if name != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": section}))

    facts = ModelFacts.load(tmp_path)

    assert (facts.model_type, facts.context_tokens) == ("gemma3", 8192)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        pytest.param({"max_position_embeddings": ...}, "max_position_embeddings is missing", id="missing"),
        pytest.param({"vocab_size": "many"}, "vocab_size must be a positive integer", id="not a number"),
        pytest.param({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer", id="zero"),
        pytest.param({"eos_token_id": "</s>"}, "eos_token_id", id="stop token as text"),
        pytest.param({"model_type": ...}, "model_type", id="no type"),
        pytest.param({"text_config": 3}, "text_config", id="a section that is none"),
    ],
)
def test_a_bad_field_is_named_with_its_file(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    write(tmp_path, **changes)

    with pytest.raises(ConfigError, match=part) as caught:
        ModelFacts.load(tmp_path)

    assert "config.json" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelFacts.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        ModelFacts.load(tmp_path)
