"""A GGUF becomes a folder with the same weights and tokens, which appears whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from common.errors import ConfigError
from engine.convert import convert, main
from engine.weights import load_model

# llama.cpp's names for a llama's tensors, by the Hugging Face name of each.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _interleaved(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of Q or K as llama.cpp's rotary embedding wants them."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write_gguf(model_dir: Path, file: Path) -> None:
    """Write the tiny llama in `model_dir` as an fp32 GGUF."""
    model = load_model(model_dir)
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".")
        in_layer = "layers" in parts
        target = f"blk.{parts[2]}.{_NAMES['.'.join(parts[3:])]}" if in_layer else _NAMES[".".join(parts)]
        values = weight.numpy()
        if target.endswith("attn_q"):
            values = _interleaved(values, config.num_attention_heads)
        if target.endswith("attn_k"):
            values = _interleaved(values, config.num_key_value_heads)
        writer.add_tensor(f"{target}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write_gguf(tiny_model("llama"), file)
    return file


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, float]]]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    stages: list[tuple[str, float]] = []
    convert(source, folder, lambda stage, fraction: stages.append((stage, fraction)))
    return folder, stages


def test_the_converted_model_has_the_same_weights(
    converted: tuple[Path, list[tuple[str, float]]], tiny_model: Callable[[str], Path]
) -> None:
    theirs, ours = load_model(tiny_model("llama")).state_dict(), load_model(converted[0]).state_dict()

    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_the_original_lies_beside_and_progress_goes_up_to_the_end(
    converted: tuple[Path, list[tuple[str, float]]], source: Path
) -> None:
    folder, stages = converted

    assert (folder / "model.gguf").read_bytes() == source.read_bytes()
    assert [stage for stage, _ in stages] == ["tokenizer", "weights", "save", "done"]
    assert [fraction for _, fraction in stages] == sorted(fraction for _, fraction in stages)
    assert stages[-1][1] == 1.0
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_the_tokenizer_splits_digits_as_the_gguf_says(converted: tuple[Path, list[tuple[str, float]]]) -> None:
    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))

    assert tokenizer.encode("12345").tokens == list("12345")
    assert tokenizer.decode(tokenizer.encode("héllo 42 🙂").ids) == "héllo 42 🙂"
    assert tokenizer.encode("<|im_end|>").ids == [3]


def test_a_finished_folder_is_left_as_it_is(
    converted: tuple[Path, list[tuple[str, float]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(tmp_path / "gone.gguf"), str(converted[0])])

    assert code == 0
    assert capsys.readouterr().out == '{"stage": "done", "fraction": 1.0}\n'


@pytest.mark.parametrize("content", [b"", b"GGUF" + b"\x00" * 100])
def test_a_damaged_source_leaves_nothing_and_says_so_in_one_line(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "bad.gguf"
    source.write_bytes(content)

    code = main([str(source), str(tmp_path / "models" / "bad")])

    assert code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "bad.gguf" in line
    assert list((tmp_path / "models").iterdir()) == []


def test_a_truncated_source_is_refused_with_the_tensor_s_name(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source.read_bytes()[:-100])

    assert main([str(cut), str(tmp_path / "models" / "cut")]) == 1

    [line] = capsys.readouterr().err.splitlines()
    assert "cut.gguf: tensor output.weight ends beyond the end of the file: it is cut short" in line
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.gguf is missing"):
        convert(tmp_path / "gone.gguf", tmp_path / "model", lambda *_: None)
