"""Backend `reference` takes any architecture that computes by paged attention what it does by its own, or refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.config import EngineConfig
from common.errors import ConfigError
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk

SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = 24
TAKEN: dict[str, dict[str, Any]] = {
    "phi3": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "glm4": {"num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {"num_key_value_heads": 2},
    "gpt2": {},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": (
        {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
        "computes something else than with its own",
    ),  # sinks
    "deepseek_v3": ({"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}, "cannot compute"),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"], "num_key_value_heads": 4}, "3 layers used .* 1 times"),
    "bloom": ({}, "3 layers used .* 0 times"),  # biases of scores, by code of its own
    "llama4_text": ({"num_key_value_heads": 2, "num_local_experts": 2, "head_dim": 16}, "attention_chunk_size"),
}


def make(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    """Write a tiny random model of any architecture, its weights drawn wide."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SHAPE, **settings)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape)
        if weight.ndim == 1:
            weight.data.add_(0.1 * noise)
        else:
            weight.data.copy_(noise if "embed" in name else noise * 2.0 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Engine:
    return Engine.load(folder, EngineConfig(backend="reference", pool_blocks=32, block_tokens=8, threads=1), "tiny")


@pytest.mark.parametrize("family", TAKEN)
def test_an_architecture_that_nobody_tried_gets_hugging_face_s_tokens_beyond_its_window_too(
    tmp_path: Path, family: str
) -> None:
    folder = make(tmp_path, family, TAKEN[family])
    prompt, num_new = [7 * i % 190 + 2 for i in range(WINDOW + 9)], 12
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor([prompt])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)

    engine = load(folder)
    sequence = Sequence.start("r", prompt, len(prompt), SamplingParams(max_tokens=num_new), engine.block_tokens)
    sequence.block_table = engine.pool.allocate(engine.blocks_for(len(prompt) + num_new))
    while engine.finish_reason(sequence) is None:
        chunk = ScheduledChunk(sequence, min(10, sequence.num_uncomputed))
        engine.complete(chunk, engine.step([chunk])[0])
    engine.close()

    assert sequence.token_ids == theirs[0].tolist()


@pytest.mark.parametrize("family", REFUSED)
def test_what_paged_attention_does_not_reproduce_is_refused_with_what_was_seen(tmp_path: Path, family: str) -> None:
    settings, words = REFUSED[family]
    folder = make(tmp_path, family, settings)

    with pytest.raises(ConfigError, match=rf"{family}.*{words}"):
        load(folder)


def test_a_window_that_a_model_keeps_to_itself_is_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path, "starcoder2", TAKEN["starcoder2"])
    attention = transformers.AttentionInterface()["baton_paged"]

    def blind(*arguments: Any, **named: Any) -> Any:
        return attention(*arguments, **{**named, "sliding_window": None})

    transformers.AttentionInterface.register("baton_paged", blind)
    try:
        with pytest.raises(ConfigError, match="computes something else than with its own"):
            load(folder)
    finally:
        transformers.AttentionInterface.register("baton_paged", attention)
