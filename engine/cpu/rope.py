"""Rotary embeddings whose angle is position times a fixed frequency: default, linear, Llama 3 and YaRN scaling."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError

Frequencies = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """`inverse_frequencies` [head_dim / 2] fp32; cosines and sines are multiplied by `factor`."""

    inverse_frequencies: Frequencies
    factor: float


def parse_rope(config: dict[str, Any], head_dim: int) -> tuple[Rope, ...]:
    """Return the model's rotary embeddings: one, or (full attention, sliding attention) where they differ.

    Args:
        config: a config.json, with `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.
        head_dim: width of a head.

    Raises:
        ConfigError: a scaling that is not known, or one whose parameters are missing.
    """
    parameters = config.get("rope_parameters")
    context = int(config.get("max_position_embeddings", 0))
    if isinstance(parameters, dict) and "full_attention" in parameters:
        kinds = ("full_attention", "sliding_attention")
        return tuple(_rope(parameters.get(kind) or {}, head_dim, context) for kind in kinds)
    if isinstance(parameters, dict):
        return (_rope({"rope_theta": config.get("rope_theta", 10000.0), **parameters}, head_dim, context),)
    theta = {"rope_theta": config.get("rope_theta", 10000.0)}
    full = _rope({**theta, **(config.get("rope_scaling") or {})}, head_dim, context)
    if (local := config.get("rope_local_base_freq")) is not None:
        return full, _rope({"rope_theta": local}, head_dim, context)
    return (full,)


def _rope(parameters: dict[str, Any], head_dim: int, context: int) -> Rope:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta", 10000.0))
    base = (1.0 / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))).astype(
        np.float32
    )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor is not known")
    try:
        match kind:
            case "default":
                return Rope(base, 1.0)
            case "linear":
                return Rope((base / np.float32(parameters["factor"])).astype(np.float32), 1.0)
            case "llama3":
                return Rope(_llama3(base, parameters), 1.0)
            case "yarn":
                return _yarn(base, theta, parameters, head_dim, context)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"rotary embedding {kind!r}: bad or missing parameter {error}") from error
    raise ConfigError(f"rotary embedding {kind!r} is not known")


def _llama3(base: Frequencies, parameters: dict[str, Any]) -> Frequencies:
    """Long waves are stretched, short ones kept, between them a blend (Llama 3.1's own code)."""
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    window = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / base
    blend = (window / wavelength - low) / (high - low)
    blended = (1 - blend) * base / factor + blend * base
    result = np.where(wavelength > window / low, base / factor, base)
    between = (wavelength >= window / high) & (wavelength <= window / low)
    return np.where(between, blended, result).astype(np.float32)


def _yarn(base: Frequencies, theta: float, parameters: dict[str, Any], head_dim: int, context: int) -> Rope:
    """YaRN (arXiv 2309.00071), with the parameters that transformers reads."""
    window = int(parameters.get("original_max_position_embeddings") or context)
    factor = float(parameters.get("factor") or context / window)

    def scale(by: float, mscale: float = 1.0) -> float:
        return 1.0 if by <= 1 else 0.1 * mscale * math.log(by) + 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = scale(factor, mscale) / scale(factor, mscale_all) if mscale and mscale_all else scale(factor)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(window / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(parameters.get("beta_fast") or 32))
    high = dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return Rope((base / factor * (1 - kept) + base * kept).astype(np.float32), float(attention))
