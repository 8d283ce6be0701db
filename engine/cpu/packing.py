"""Weights -> the blocks that the kernels read (csrc/matrix.h draws them), 16 rows to a panel."""

import numpy as np
import numpy.typing as npt

from engine.checkpoint import Blocks, Bytes, Floats
from engine.cpu.native import Format

PANEL = 16
BLOCK = 32
_Halves = npt.NDArray[np.float16]


def padded(n: int, multiple: int = BLOCK) -> int:
    """Round up."""
    return -(-n // multiple) * multiple


def packed_bytes(rows: int, k: int, format_: Format) -> int:
    """Bytes of a packed matrix; `rows` a multiple of 16, `k` of 32."""
    return rows // PANEL * (k // BLOCK) * format_.block_bytes


def pack_floats(weights: Floats, format_: Format) -> Bytes:
    """Pack [rows, k] fp32; rows are padded to 16 and k to 32, with zeros."""
    rows, k = weights.shape
    weights = np.pad(weights, ((0, -rows % PANEL), (0, -k % BLOCK)))
    panels = weights.reshape(-1, PANEL, weights.shape[1] // BLOCK, BLOCK).transpose(0, 2, 1, 3)  # [P, B, 16, 32]
    match format_:
        case Format.FP32:
            return np.ascontiguousarray(panels.transpose(0, 1, 3, 2)).view(np.uint8).reshape(-1)
        case Format.W8:
            scale = (np.abs(panels).max(-1) / 127).astype(np.float16)
            return _pack_w8(scale, np.clip(_divide(panels, scale), -127, 127) + 128)
        case Format.Q4:
            least = panels.min(-1).astype(np.float16)
            scale = ((panels.max(-1) - least) / 15).astype(np.float16)
            values = _divide(panels - least[..., None].astype(np.float32), scale)
            return _pack_q4(scale, least, np.clip(values, 0, 15))


def pack_blocks(blocks: Blocks) -> Bytes:
    """Reorder a GGUF matrix's bytes; no value changes. Rows are padded to 16 with zeros."""
    data = blocks.data
    data = np.pad(data, ((0, -len(data) % PANEL), (0, 0), (0, 0)))
    panels = data.reshape(-1, PANEL, *data.shape[1:]).transpose(0, 2, 1, 3)  # [P, B, 16, bytes]
    panels = np.ascontiguousarray(panels)
    scale = panels[..., 0:2].copy().view(np.float16)[..., 0]
    match blocks.kind:
        case "Q8_0":
            return _join(scale, None, panels[..., 2:] ^ np.uint8(128))
        case "Q4_1":
            return _join(scale, panels[..., 2:4].copy().view(np.float16)[..., 0], panels[..., 4:])
        case _:  # Q4_0: d (u - 8)
            return _join(scale, scale * np.float16(-8), panels[..., 2:])


def block_format(kind: str) -> Format:
    """Return the format that GGUF blocks of a kind become."""
    return Format.W8 if kind == "Q8_0" else Format.Q4


def _divide(values: Floats, scale: _Halves) -> Floats:
    wide = scale[..., None].astype(np.float32)
    return np.rint(np.divide(values, wide, out=np.zeros_like(values), where=wide != 0))


def _pack_w8(scale: _Halves, values: Floats) -> Bytes:
    return _join(scale, None, values.astype(np.uint8))


def _pack_q4(scale: _Halves, least: _Halves, values: Floats) -> Bytes:
    u = values.astype(np.uint8)
    return _join(scale, least, (u[..., :16] | (u[..., 16:] << 4)).astype(np.uint8))


def _join(scale: _Halves, least: _Halves | None, values: Bytes) -> Bytes:
    """[P, B, 16] scales (and minima), [P, B, 16, bytes] values -> blocks: four bytes of each column in turn."""
    panels, blocks, columns, size = values.shape
    groups = values.reshape(panels, blocks, columns, size // 4, 4).transpose(0, 1, 3, 2, 4)
    parts = [np.ascontiguousarray(scale).view(np.uint8).reshape(panels, blocks, -1)]
    if least is not None:
        parts.append(np.ascontiguousarray(least).view(np.uint8).reshape(panels, blocks, -1))
    parts.append(groups.reshape(panels, blocks, -1))
    return np.concatenate(parts, axis=-1).reshape(-1)
