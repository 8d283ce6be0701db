"""A model loads completely or is refused with an error that names the file or tensor at fault."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from common.config import EngineConfig
from common.errors import ConfigError
from engine.checkpoint import ModelFileError
from engine.engine import Engine
from engine.weights import load_model


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of the tiny llama that a test may damage."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def _edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    edit(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"no model folder at .*/model"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not readable JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json holds a list"),
    "unknown family": (lambda f: _edit_config(f, model_type="gpt9"), r"model_type 'gpt9' is no language model"),
    "another family's weights": (lambda f: _edit_config(f, model_type="gpt2"), r"tensors are missing: transformer\.h"),
    "rope over the batch": (
        lambda f: _edit_config(f, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        r"rotary embedding 'dynamic' is not supported",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "half the weights file": (lambda f: _truncate(f / "model.safetensors"), r"tensor \S+ lies at bytes .* cut short"),
    "no bytes": (lambda f: (f / "model.safetensors").write_bytes(b""), r"model\.safetensors is not readable"),
    "a missing shard": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-2.safetensors"}}'),
        r"model-2\.safetensors is missing",
    ),
    "a missing tensor": (
        lambda f: _edit_tensors(f, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
        r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "no shard": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        r"index\.json names no files",
    ),
    "a value that is not finite": (
        lambda f: _edit_tensors(f, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan)),
        r"tensor model\.norm\.weight holds values that are not finite",
    ),
    "a tensor of another shape": (
        lambda f: _edit_tensors(f, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})),
        r"1 tensors are mismatched: model\.norm\.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused_by_name(model: Path, damage: str) -> None:
    inflict, words = DAMAGE[damage]
    inflict(model)

    with pytest.raises(ConfigError, match=words):
        load_model(model)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_an_engine_says_once_which_tensor_is_damaged(model: Path, backend: str) -> None:
    _truncate(model / "model.safetensors")

    with pytest.raises(ModelFileError, match=r"^[^;]*tensor \S+ lies at bytes [^;]*$"):
        Engine.load(model, EngineConfig.model_validate({"backend": backend}), "tiny")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"hello world" * 10])
def test_a_damaged_gguf_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.gguf is not (a GGUF|a readable GGUF|readable)"):
        load_model(file)


def test_a_missing_gguf_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.gguf is missing"):
        load_model(tmp_path / "nothing.gguf")


def test_a_model_is_fp32_and_does_not_train(model: Path) -> None:
    loaded = load_model(model)

    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())
