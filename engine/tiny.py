"""Tiny random models of each supported family, complete with tokenizer and chat template. For tests of every part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.tiny_text import CONTEXT_TOKENS, VOCAB_TOKENS, write_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0},
    "gemma3": {"sliding_window": 24, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3},
}


def make_tiny_model(dir: Path, family: str = "llama", seed: int = 0) -> Path:  # noqa: A002  # the agreed name
    """Write a random model of `family` into the folder `dir`, made if missing; return `dir`.

    The same family and seed give the same weights. Weights are drawn wide, so that logits are far apart and greedy
    tokens do not depend on the last bit.

    Raises:
        KeyError: a family that FAMILIES lacks.
    """
    import torch
    import transformers

    classes: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }
    config_class, model_class = classes[family]
    config = config_class(**_SHAPE, **FAMILIES[family])
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            _draw(name, weight, generator, torch)
    dir.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = [0, 3]
    model.save_pretrained(dir)
    write_tokenizer(dir)
    return dir


def _draw(name: str, weight: Any, generator: Any, torch: Any) -> None:
    """Fill one parameter. Norms stay near their neutral value, whatever it is in this family."""
    noise = torch.randn(weight.shape, generator=generator)
    if weight.ndim == 1:
        weight.add_(0.1 * noise)
    elif "embed" in name or "lm_head" in name:
        weight.copy_(noise)
    else:
        weight.copy_(noise * 2.0 / weight.shape[1] ** 0.5)
