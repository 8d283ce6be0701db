"""What a checkpoint's own files say about the model. No torch: the gateway must know the window and the stop tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Read from config.json and generation_config.json of a model folder."""

    model_type: str
    context_tokens: int
    """Most tokens of prompt and output together, `max_position_embeddings`."""
    vocab_tokens: int
    """Size of the embedding: a token id is below it."""
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence; may be empty."""
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Read the files of `model_dir`.

        Raises:
            ConfigError: a file or field is missing, or is not what it must be; the message names both.
        """
        path = model_dir / "config.json"
        config = read_json(path)
        # Checkpoints that also see or hear keep the language model's part in a section of its own.
        section = config.get("text_config", config)
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: text_config must be a mapping, got {section!r}")
        num_heads = _positive(path, section, "num_attention_heads")
        return cls(
            model_type=_model_type(path, config),
            context_tokens=_positive(path, section, "max_position_embeddings"),
            vocab_tokens=_positive(path, section, "vocab_size"),
            eos_token_ids=_eos_token_ids(model_dir, section),
            num_layers=_positive(path, section, "num_hidden_layers"),
            num_kv_heads=_positive(path, section, "num_key_value_heads", num_heads),
            head_dim=_head_dim(path, section),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: naming the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"model file {path} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model file {path} is not readable JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model file {path} holds a {type(value).__name__}, not an object")
    return value


def _model_type(path: Path, config: dict[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{path}: model_type must be a name, got {model_type!r}")
    return model_type


def _positive(path: Path, section: dict[str, Any], name: str, default: int | None = None) -> int:
    value = section.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{path}: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{path}: {name} must be a positive integer, got {value!r}")
    return value


def _head_dim(path: Path, section: dict[str, Any]) -> int:
    if section.get("head_dim") is not None:
        return _positive(path, section, "head_dim")
    return _positive(path, section, "hidden_size") // _positive(path, section, "num_attention_heads")


def _eos_token_ids(model_dir: Path, section: dict[str, Any]) -> frozenset[int]:
    """Return the stop tokens; generation_config.json has the last word, as in transformers' generate."""
    path = model_dir / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        path, value = model_dir / "config.json", section.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(ids)
