"""What is wrong with a model's files is said in one typed error that names the tensor or the file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from engine.checkpoint import Checkpoint, Gguf, ModelFileError
from engine.cpu.architecture import read_architecture, supports
from engine.cpu.native import Format
from engine.cpu.weights import PackedWeights


def save(folder: Path, **tensors: np.ndarray) -> Path:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def test_rows_are_read_as_fp32_whatever_they_are_stored_as(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)

    opened = Checkpoint.open(save(tmp_path, a=values, b=values.astype(np.float16)))

    for name in "ab":
        assert (opened.rows(name, (4, 3), 1, 3) == values[1:3]).all()


def test_a_truncated_file_is_refused_with_the_tensor_s_name(tmp_path: Path) -> None:
    file = save(tmp_path, weight=np.ones((64, 64), np.float32)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(ConfigError, match=r"tensor weight .* cut short"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, struct.pack("<Q", 5) + b"[1,2]"])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_damaged_is_read_as_it_was_or_refused_with_a_typed_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    values: dict[str, np.ndarray] = {"a.weight": np.ones((4, 3), np.float32), "b": np.zeros(5, np.float16)}
    file = save(tmp_path, **values) / "model.safetensors"
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.one_of(st.none(), st.integers(0, len(content))))])

    try:
        opened = Checkpoint.open(tmp_path)
        for name, value in values.items():
            assert opened.rows(name, value.shape, 0, len(value)).shape == value.shape
    except ModelFileError as error:
        damage = error.message
    else:
        damage = str(tmp_path)

    assert str(tmp_path) in damage


@pytest.mark.parametrize(
    ("shape", "value", "reason"),
    [((2, 3), 1.0, "shape"), ((4, 3), np.nan, "not finite")],
    ids=["another shape", "NaN"],
)
def test_an_unusable_tensor_is_named(tmp_path: Path, shape: tuple[int, int], value: float, reason: str) -> None:
    opened = Checkpoint.open(save(tmp_path, here=np.full(shape, value, np.float32)))

    with pytest.raises(ConfigError, match=f"tensor here .*{reason}"):
        opened.rows("here", (4, 3), 0, 4)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor there is missing"):
        Checkpoint.open(save(tmp_path, here=np.ones(3, np.float32))).vector("there", 3)


def test_a_model_that_lacks_a_tensor_is_not_packed(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_model("llama")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save(tmp_path, **tensors)

    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        PackedWeights.open(tmp_path, read_architecture(tmp_path), Format.W8)

    assert not list(tmp_path.glob(".packed*"))


def test_a_damaged_packed_file_is_made_again(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("qwen2")
    architecture = read_architecture(folder)
    PackedWeights.open(folder, architecture, Format.Q4).close()
    (packed,) = folder.glob(".packed-q4-*.bin")
    packed.write_bytes(packed.read_bytes()[:-5])

    opened = PackedWeights.open(folder, architecture, Format.Q4)

    assert "2.down" in opened.entries
    opened.close()


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (2, "is not a GGUF"),
        (40, "is not a readable GGUF"),
        (-700, r"tensor plain begins beyond .*cut short"),
        (-545, r"tensor plain ends beyond .*cut short"),
        (-544, r"tensor w ends beyond .*cut short"),
        (-1, r"tensor w ends beyond .*cut short"),
    ],
)
def test_a_truncated_gguf_is_refused_with_the_tensor_s_name(tmp_path: Path, cut: int, words: str) -> None:
    file = tmp_path / "model.gguf"
    tensors = {"plain": (0, np.zeros((1, 128), np.uint8)), "w": (8, np.zeros((16, 34), np.uint8))}
    whole = write_gguf("llama", tensors)
    file.write_bytes(whole)
    assert Gguf(file).find("w", (16, 32)) is not None
    file.write_bytes(whole[:cut])

    with pytest.raises(ModelFileError, match=rf"model\.gguf.*{words}"):
        Gguf(file)


def write_gguf(architecture: str, tensors: dict[str, tuple[int, np.ndarray]]) -> bytes:
    """Serialise matrices of one block of 32 a row: name -> (ggml type, bytes)."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    out += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    out += text("padding") + struct.pack("<IIQ", 9, 8, 40) + text("x") * 40
    body = b""
    for name, (kind, data) in tensors.items():
        body += bytes(-len(body) % 32)
        out += text(name) + struct.pack("<IQQIQ", 2, 32, len(data), kind, len(body))
        body += data.tobytes()
    return out + bytes(-len(out) % 32) + body


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"head_dim": 20}, "head_dim"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_act": "relu"}, "relu"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_the_kernels_do_not_know_is_refused_with_a_reason(
    tiny_model: Callable[[str], Path], change: dict[str, object], reason: str
) -> None:
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    assert supports(config) is None

    assert reason in str(supports({**config, **change}))
