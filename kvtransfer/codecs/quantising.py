"""What int8 and fp8 share: a scale for each group of channels of a head in a slab, and the kernel that applies it.

    encoded = [slabs][heads][groups] float32 scales, then [slabs][tokens][heads][dim] bytes
    value ~ byte * scale

A scale covers all tokens of a block and `GROUP` neighbouring channels: keys have channels that are large in every
token, and would spoil the scale of the others. The numpy code here is the definition; csrc/quantise.cpp does the same,
bit for bit and some ten times as fast, where the machine has AVX2 and a compiler.
"""

import ctypes
import functools
import logging
from abc import ABC, abstractmethod
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.compiling import compiled
from common.errors import ConfigError, TransferError
from common.logs import log
from kvtransfer.codecs.base import Slabs
from kvtransfer.codecs.elements import Floats, from_float32, to_float32

logger = logging.getLogger(__name__)

GROUP = 8
"""Channels under one scale: 128 values in a block of 16 tokens, so that scales add 3 % to the bytes."""
TINY = 1e-30
"""Groups whose largest value is below become zero: their scale could not be inverted."""
SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
)
_CPU_FLAGS = {"avx2", "fma", "f16c"}
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


class QuantisingCodec(ABC):
    """Implements `Codec` for a type of one byte. What has a byte a value in the pool already travels as it is."""

    is_lossless = False
    name: str
    largest: float
    """What the largest value of a group becomes."""
    kernel_kind: int
    """As csrc/quantise.cpp calls this type."""

    @abstractmethod
    def _to_bytes(self, values: Floats) -> NDArray[np.uint8]:
        """Round scaled values to the type."""

    @abstractmethod
    def _to_values(self, codes: NDArray[np.uint8]) -> Floats:
        """Return the values of bytes, before scaling."""

    def encoded_max(self, slabs: Slabs) -> int:
        """Return the one length that there is for these slabs."""
        if slabs.dtype not in _DTYPES:
            return slabs.num_bytes
        return 4 * _num_scales(slabs) + slabs.num_values

    def encode(self, raw: memoryview, slabs: Slabs) -> memoryview:
        """Quantise; see `Codec.encode`."""
        assert raw.nbytes == slabs.num_bytes
        if slabs.dtype not in _DTYPES:
            return raw
        encoded = np.empty(self.encoded_max(slabs), dtype=np.uint8)
        kernel = library()
        if kernel is None:
            is_finite = self.encode_by_numpy(raw, slabs, encoded)
        else:
            source = np.frombuffer(raw, dtype=np.uint8)
            is_finite = not kernel.baton_quantise(
                _shape(slabs, self.kernel_kind), source.ctypes.data, encoded.ctypes.data
            )
        if not is_finite:
            raise TransferError(f"{self.name} cannot carry values that are not finite")
        return encoded.data

    def decode(self, encoded: memoryview, slabs: Slabs, raw: memoryview) -> None:
        """Multiply by the scales; see `Codec.decode`. Whatever the bytes are, the values are finite."""
        if encoded.nbytes != self.encoded_max(slabs):
            raise TransferError(f"{encoded.nbytes} bytes of {self.name} in place of {self.encoded_max(slabs)}")
        if slabs.dtype not in _DTYPES:
            raw[:] = encoded
            return
        scales = np.frombuffer(encoded, dtype=np.float32, count=_num_scales(slabs))
        # The kernel multiplies by what a peer sent: a scale that is no number, or too large, would poison a block.
        if not (np.abs(scales) <= np.finfo(np.float32).max / self.largest).all():
            raise TransferError(f"scales of {self.name} that are not finite")
        kernel = library()
        if kernel is None:
            self.decode_by_numpy(encoded, slabs, raw)
            return
        source, target = np.frombuffer(encoded, dtype=np.uint8), np.frombuffer(raw, dtype=np.uint8)
        kernel.baton_restore(_shape(slabs, self.kernel_kind), source.ctypes.data, target.ctypes.data)

    def encode_by_numpy(self, raw: memoryview, slabs: Slabs, encoded: NDArray[np.uint8]) -> bool:
        """Do what the kernel does; return whether all values were finite."""
        values = to_float32(raw, slabs.dtype).reshape(_grouped(slabs))
        largest = np.abs(values).max(axis=(1, 4), keepdims=True)
        if not np.isfinite(largest).all():
            return False
        is_used = largest > np.float32(TINY)
        inverse = np.divide(np.float32(self.largest), largest, out=np.zeros_like(largest), where=is_used)
        scales = np.where(is_used, largest * np.float32(1 / self.largest), np.float32(0))
        split = 4 * _num_scales(slabs)
        encoded[:split] = scales.reshape(-1).view(np.uint8)
        encoded[split:] = self._to_bytes(values * inverse).reshape(-1)
        return True

    def decode_by_numpy(self, encoded: memoryview, slabs: Slabs, raw: memoryview) -> None:
        """Do what the kernel does."""
        split = 4 * _num_scales(slabs)
        count, _, heads, groups, _ = _grouped(slabs)
        scales = np.frombuffer(encoded[:split], dtype=np.float32).reshape(count, 1, heads, groups, 1)
        codes = np.frombuffer(encoded[split:], dtype=np.uint8).reshape(_grouped(slabs))
        from_float32((self._to_values(codes) * scales).reshape(-1), slabs.dtype, raw)


@functools.cache
def library() -> Any | None:
    """Return the loaded kernel; None where it cannot be had, which is logged once. Blocks for seconds at first."""
    try:
        if missing := _CPU_FLAGS - _cpu_flags():
            raise ConfigError(f"this machine lacks {', '.join(sorted(missing))}")
        loaded = ctypes.CDLL(str(compiled(SOURCES, "quantise.cpp", "libquantise.so", _FLAGS)))
    except (ConfigError, OSError) as error:
        log(logger, logging.WARNING, f"SLOW PATH: blocks are quantised by numpy: {error}")
        return None
    for function in (loaded.baton_quantise, loaded.baton_restore):
        function.argtypes = [ctypes.POINTER(_Shape), c_void_p, c_void_p]
        function.restype = c_int32
    return loaded


class _Shape(ctypes.Structure):
    """csrc/quantise.cpp: Shape."""

    _fields_ = [
        *((name, c_int64) for name in ("count", "tokens", "heads", "dim", "group")),
        *((name, c_int32) for name in ("dtype", "kind")),
    ]


def _shape(slabs: Slabs, kind: int) -> Any:
    shape = _Shape(slabs.num_slabs, slabs.tokens, slabs.heads, slabs.dim, _group(slabs), _DTYPES[slabs.dtype], kind)
    return ctypes.byref(shape)


def _group(slabs: Slabs) -> int:
    return GROUP if slabs.dim % GROUP == 0 else slabs.dim


def _grouped(slabs: Slabs) -> tuple[int, int, int, int, int]:
    group = _group(slabs)
    return slabs.num_slabs, slabs.tokens, slabs.heads, slabs.dim // group, group


def _num_scales(slabs: Slabs) -> int:
    return slabs.num_slabs * slabs.heads * (slabs.dim // _group(slabs))


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
