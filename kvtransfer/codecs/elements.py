"""A pool's element types as float32 and back, in numpy, which has no bfloat16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
F16_MAX = float(np.finfo(np.float16).max)


def to_float32(raw: memoryview, dtype: str) -> Floats:
    """Return the values of `raw` as a flat float32 array."""
    values = np.frombuffer(raw, dtype=_TYPES[dtype])
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def from_float32(values: Floats, dtype: str, raw: memoryview) -> None:
    """Write flat finite values into `raw`, rounded to nearest, ties to even; beyond a type's range lies its end."""
    target = np.frombuffer(raw, dtype=_TYPES[dtype])
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        target[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    elif dtype == "float16":
        target[:] = np.clip(values, -F16_MAX, F16_MAX)
    else:
        target[:] = values
