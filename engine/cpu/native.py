"""The C interface of the kernels (csrc/model.h) through ctypes, which releases the GIL for the length of a step."""

import ctypes
import functools
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

from common.errors import ConfigError
from engine.cpu.build import Isa, build_library


class Format(IntEnum):
    """How a matrix is packed; see csrc/matrix.h."""

    FP32 = 0
    W8 = 1
    Q4 = 2

    @property
    def block_bytes(self) -> int:
        """Bytes of 16 columns x 32 values."""
        return {Format.FP32: 2048, Format.W8: 544, Format.Q4: 320}[self]


class KvFormat(IntEnum):
    """What the pool holds; see csrc/attention.h."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3


class Precision(IntEnum):
    """What the activations in front of a matrix are rounded to."""

    EXACT = 0
    INT8 = 1
    INT16 = 2


class MatrixDesc(Structure):
    """csrc/matrix.h: Matrix."""

    _fields_ = [("data", c_void_p), ("n", c_int64), ("k", c_int64), ("format", c_int32), ("precision", c_int32)]


class LayerDesc(Structure):
    """csrc/model.h: LayerDesc."""

    _fields_ = [
        ("qkv", MatrixDesc),
        ("output", MatrixDesc),
        ("gate_up", MatrixDesc),
        ("down", MatrixDesc),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("output_bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int64),
        ("rope", c_int64),
    ]


class ModelDesc(Structure):
    """csrc/model.h: ModelDesc."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        *((name, c_int64) for name in ("num_layers", "threads", "gelu")),
        *((name, c_float) for name in ("epsilon", "embed_factor", "attention_scale")),
        *((name, c_float) for name in ("attention_softcap", "logit_softcap")),
        ("rope_factor", c_float * 2),
        ("inverse_frequencies", c_void_p * 2),
        ("final_norm", c_void_p),
        ("embedding", MatrixDesc),
        ("head", MatrixDesc),
        ("layers", POINTER(LayerDesc)),
    ]


LayersDone = CFUNCTYPE(None, c_int64)
"""Called by the thread that called `NativeModel.step`, which waits meanwhile for the GIL."""


class StepDesc(Structure):
    """csrc/model.h: StepDesc."""

    _fields_ = [
        *((name, c_int64) for name in ("num_tokens", "num_segments", "table_width", "num_logit_rows", "logits_stride")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "segments", "block_tables", "logit_rows")),
        ("logits", c_void_p),
        ("num_greedy_rows", c_int64),
        *((name, c_void_p) for name in ("greedy_rows", "winners")),
        ("pool", c_void_p),
        *((name, c_int64) for name in ("num_blocks", "num_pool_layers", "block_tokens", "kv_format")),
        ("num_marks", c_int64),
        ("marks", c_void_p),
        ("layers_done", LayersDone),
    ]


class NativeModel:
    """One model's kernels and threads. The weights that `desc` points at must outlive it. One caller at a time."""

    def __init__(self, isa: Isa, desc: ModelDesc) -> None:
        """Start the threads.

        Raises:
            ConfigError: the kernels cannot be compiled or loaded, or the machine refuses the threads.
        """
        self._library = _load(build_library(isa))
        self._handle: int | None = self._library.baton_create(ctypes.byref(desc))
        if self._handle is None:
            raise ConfigError(f"cannot start {desc.threads} compute threads")

    def step(self, desc: StepDesc) -> None:
        """Run one step.

        Raises:
            ValueError: the batch is inconsistent; nothing was computed.
        """
        assert self._handle is not None
        problem = self._library.baton_step(self._handle, ctypes.byref(desc))
        if problem is not None:
            raise ValueError(problem.decode())

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        if self._handle is not None:
            self._library.baton_destroy(self._handle)
            self._handle = None


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"cannot load {path}: {error}") from error
    library.baton_create.argtypes = [POINTER(ModelDesc)]
    library.baton_create.restype = c_void_p
    library.baton_step.argtypes = [c_void_p, POINTER(StepDesc)]
    library.baton_step.restype = c_char_p
    library.baton_destroy.argtypes = [c_void_p]
    library.baton_destroy.restype = None
    return library
