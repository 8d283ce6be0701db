"""A model's source -> Hugging Face modules with all their weights, or a ConfigError that names what is wrong.

A source is a folder with safetensors or a `.gguf` file on this machine; what a hub id means, and fetching it, is the
model store's business.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import ConfigError
from common.model_facts import read_json
from engine.checkpoint import Checkpoint, Gguf, ModelFileError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""Values of config.json's model_type that tests hold to Hugging Face's tokens; others are checked when they are loaded,
see engine.self_check."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary embeddings that depend on a token's position alone; `dynamic` and `longrope` look at the whole batch."""
_NAMES_SHOWN = 3


def load_model(path: Path, attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model on the CPU, in evaluation mode.

    Args:
        path: folder or `.gguf` file.
        attention: name of a registered attention function; None: the family's own default.
        dtype: of the weights.

    Returns:
        A transformers PreTrainedModel.

    Raises:
        ConfigError: missing, corrupt or unsupported; the message names the file or the tensors.
    """
    transformers.utils.logging.disable_progress_bar()
    # Its warnings are about what `_check_report` makes an error of.
    transformers.utils.logging.set_verbosity_error()
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if attention is not None:
        options["attn_implementation"] = attention
    if path.suffix == ".gguf":
        check_gguf(path)
        options["gguf_file"] = path.name
        folder = path.parent
    else:
        _check_folder(path)
        folder = path
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # foreign code reading foreign files: whatever it raises means that they do not load
        raise ConfigError(f"cannot load model {path}: {_one_line(error)}") from error
    _check_report(path, report)
    _check_rope(path, model.config)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ModelFileError(f"model {path}: tensor {name} holds values that are not finite")
    return model.eval().requires_grad_(False)


def _check_folder(folder: Path) -> None:
    """Read what can be read cheaply, so that an error names the file."""
    if not folder.is_dir():
        raise ConfigError(f"no model folder at {folder}")
    config = read_json(folder / "config.json")
    family = config.get("model_type")
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"{folder / 'config.json'}: model_type {family!r} is no language model that transformers has")
    Checkpoint.open(folder)


def check_gguf(file: Path) -> None:
    """Refuse a file that is damaged, cut short or of an unknown architecture.

    Raises:
        ConfigError: naming the file, and the tensor if there is one.
    """
    if not file.is_file():
        raise ConfigError(f"model file {file} is missing")
    Gguf(file)  # names a tensor that is cut off
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        field = reader.fields.get("general.architecture")
        architecture = field.contents() if field is not None else None
    except Exception as error:  # the reader trusts the file: a damaged one fails in many ways
        raise ConfigError(f"model file {file} is not a readable GGUF: {_one_line(error)}") from error
    if architecture not in FAMILIES and architecture != "gemma3":
        raise ConfigError(f"{file}: architecture {architecture!r} is not supported: {', '.join(FAMILIES)}")


def _check_report(path: Path, report: dict[str, Any]) -> None:
    for what in ("missing", "mismatched"):
        keys = report.get(f"{what}_keys", ())
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            raise ModelFileError(f"model {path}: {len(names)} tensors are {what}: {shown}")
    if errors := report.get("error_msgs"):
        raise ConfigError(f"model {path}: {_one_line(errors[0])}")


def _check_rope(path: Path, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    # Gemma 3 has one set of parameters for each kind of layer.
    per_kind = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for parameters in per_kind:
        if parameters.get("rope_type", "default") not in ROPE_TYPES:
            raise ConfigError(f"model {path}: rotary embedding {parameters['rope_type']!r} is not supported")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:400]
