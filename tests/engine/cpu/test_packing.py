"""Packed blocks mean what the source means: GGUF's own numbers unchanged, fp32 within half a step."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from engine.checkpoint import Blocks
from engine.cpu.native import Format
from engine.cpu.packing import block_format, pack_blocks, pack_floats, packed_bytes


def unpack(data: np.ndarray, rows: int, k: int, format_: Format) -> np.ndarray:
    """The definition in csrc/matrix.h, element by element of a block."""
    blocks = data.reshape(rows // 16, k // 32, format_.block_bytes)
    out = np.zeros((rows // 16, 16, k // 32, 32), np.float32)
    for i in range(32):
        if format_ is Format.FP32:
            out[..., i] = blocks[..., i * 64 : i * 64 + 64].copy().view(np.float32).transpose(0, 2, 1)
            continue
        scale = blocks[..., :32].copy().view(np.float16).astype(np.float32)
        if format_ is Format.W8:
            byte = blocks[..., 32 + i // 4 * 64 + i % 4 :: 4][..., :16]
            out[..., i] = (scale * (byte.astype(np.float32) - 128)).transpose(0, 2, 1)
        else:
            least = blocks[..., 32:64].copy().view(np.float16).astype(np.float32)
            byte = blocks[..., 64 + i % 16 // 4 * 64 + i % 4 :: 4][..., :16]
            out[..., i] = (scale * ((byte >> 4) if i >= 16 else (byte & 15)) + least).transpose(0, 2, 1)
    return out.reshape(rows, k)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_keep_their_values(kind: str) -> None:
    weights = np.random.default_rng(0).normal(size=(32, 96)).astype(np.float32)
    quantised = quants.quantize(weights, GGMLQuantizationType[kind])

    packed = pack_blocks(Blocks(kind, quantised.reshape(32, 3, -1)))

    exact = quants.dequantize(quantised, GGMLQuantizationType[kind])
    assert np.allclose(unpack(packed, 32, 96, block_format(kind)), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("format_", "steps"), [(Format.FP32, None), (Format.W8, 127), (Format.Q4, 7.5)])
def test_floats_are_rounded_by_at_most_half_a_step(format_: Format, steps: float | None) -> None:
    weights = np.random.default_rng(1).normal(size=(48, 64)).astype(np.float32)

    packed = pack_floats(weights, format_)

    assert len(packed) == packed_bytes(48, 64, format_)
    tolerance = np.abs(weights).max() / steps * 0.52 if steps else 0.0
    assert np.abs(unpack(packed, 48, 64, format_) - weights).max() <= tolerance


@pytest.mark.parametrize("format_", list(Format))
def test_padding_is_zero(format_: Format) -> None:
    weights = np.random.default_rng(2).normal(size=(5, 40)).astype(np.float32)

    whole = unpack(pack_floats(weights, format_), 16, 64, format_)

    assert not whole[5:].any()
    if format_ is not Format.Q4:  # a block that is partly padding may shift it by a rounding of its least value
        assert not whole[:, 40:].any()
