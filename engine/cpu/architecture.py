"""config.json -> what the kernels need to know of a Llama-shaped model, or the reason why they cannot serve it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model_facts import read_json
from engine.cpu.rope import Rope, parse_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
_ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's attention: keys it sees (0: all) and which rotary embedding it uses."""

    window: int
    rope: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Llama-shaped model. Widths count floats; `softcap`s are 0 where there is none."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    gelu: bool
    epsilon: float
    embed_factor: float
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    tied: bool
    norm_offset: float
    has_post_norms: bool
    has_head_norms: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    layers: tuple[LayerShape, ...]
    ropes: tuple[Rope, ...]

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused query, key, value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`'s config.json and generation_config.json.

    Raises:
        ConfigError: missing, unreadable, or something that the kernels do not know; the message says what.
    """
    config = read_json(folder / "config.json")
    if reason := supports(config):
        raise ConfigError(f"{folder / 'config.json'}: {reason}")
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    return _parse(config, frozenset([eos] if isinstance(eos, int) else eos or []))


def supports(config: dict[str, Any]) -> str | None:
    """Return why a model with this config.json cannot be served here; None: it can."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model_type {family!r} is not one of {', '.join(FAMILIES)}"
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for name in (*needed, "max_position_embeddings"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            return f"{name} is {config.get(name)!r}"
    heads, kv_heads = config["num_attention_heads"], _kv_heads(config)
    if heads % kv_heads:
        return f"{heads} query heads do not divide by {kv_heads} KV heads"
    if _head_dim(config) % 16:
        return f"head_dim {_head_dim(config)} is no multiple of 16"
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS and not (family.startswith("gemma") and activation == "gelu"):
        return f"activation {activation!r} is not known"
    for flag in ("use_bidirectional_attention", "quantization_config"):
        if config.get(flag):
            return f"{flag} is not known"
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial_rotary_factor is not known"
    try:
        parse_rope(config, _head_dim(config))
    except ConfigError as error:
        return error.message
    return None


def _parse(config: dict[str, Any], eos_token_ids: frozenset[int]) -> Architecture:
    family, head_dim = config["model_type"], _head_dim(config)
    gemma = family.startswith("gemma")
    ropes = parse_rope(config, head_dim)
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    # Mistral and Qwen2 have no such switch: whatever their files say, transformers gives them none.
    has_attention_bias = family not in ("mistral", "qwen2") and bool(config.get("attention_bias"))
    scaled_by = config.get("query_pre_attn_scalar") if family in ("gemma2", "gemma3_text") else None
    return Architecture(
        family=family,
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=_kv_heads(config),
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        context_tokens=config["max_position_embeddings"],
        eos_token_ids=eos_token_ids,
        gelu=activation != "silu",
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        embed_factor=math.sqrt(config["hidden_size"]) if gemma else 1.0,
        attention_scale=float(scaled_by or head_dim) ** -0.5,
        attention_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
        tied=bool(config.get("tie_word_embeddings", gemma)),
        norm_offset=1.0 if gemma else 0.0,
        has_post_norms=family in ("gemma2", "gemma3_text"),
        has_head_norms=family in ("qwen3", "gemma3_text"),
        has_qkv_bias=family == "qwen2" or has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
        layers=_layers(config, len(ropes)),
        ropes=ropes,
    )


def _layers(config: dict[str, Any], num_ropes: int) -> tuple[LayerShape, ...]:
    family, count, window = config["model_type"], config["num_hidden_layers"], config.get("sliding_window") or 0
    if family in ("llama", "gemma") or (family.startswith("qwen") and not config.get("use_sliding_window")):
        window = 0
    kinds = config.get("layer_types") or [_kind(config, layer) for layer in range(count)]
    sliding = [window > 0 and kind == "sliding_attention" for kind in kinds]
    return tuple(LayerShape(window if slides else 0, 1 if slides and num_ropes > 1 else 0) for slides in sliding)


def _kind(config: dict[str, Any], layer: int) -> str:
    """Kind of a layer where an older config.json does not list them."""
    match config["model_type"]:
        case "gemma3_text":
            pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
            slides = (layer + 1) % pattern != 0
        case "gemma2":
            slides = layer % 2 == 0
        case "qwen2" | "qwen3":
            slides = layer >= config.get("max_window_layers", 0)
        case _:
            slides = True
    return "sliding_attention" if slides else "full_attention"


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kv_heads(config: dict[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])
