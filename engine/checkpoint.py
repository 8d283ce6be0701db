"""Read weights by name: safetensors as fp32, and the quantised blocks of a GGUF file as they are.

Both files are mapped and only their headers parsed, so that nothing is read that is not asked for, and so that a file
which is cut short is refused with the name of the first tensor that lies beyond its end.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_FLOATS = ("F32", "F16", "BF16")
_DTYPE_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_INDEX = "model.safetensors.index.json"
_HEADER_MAX = 100_000_000  # the safetensors format's own limit


class ModelFileError(ConfigError):
    """A file of the model is missing, damaged or lacks a tensor: no other backend could do better."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    data: Bytes
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The safetensors of one folder."""

    def __init__(self, entries: dict[str, _Entry], folder: Path) -> None:
        self._entries = entries
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map all files and read their headers.

        Raises:
            ModelFileError: a file is missing, corrupt or cut short; the message names it, and the tensor if any.
        """
        entries: dict[str, _Entry] = {}
        for file in safetensors_files(folder):
            entries.update(_read_header(file))
        return cls(entries, folder)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def rows(self, name: str, shape: tuple[int, ...], begin: int, end: int) -> Floats:
        """Return rows [begin, end) of a tensor as fp32.

        Raises:
            ModelFileError: it is missing, has another shape or type, or holds values that are not finite.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFileError(f"model {self._folder}: tensor {name} is missing")
        if entry.shape != shape:
            raise ModelFileError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}")
        if entry.dtype not in _FLOATS:
            raise ModelFileError(f"{entry.file}: tensor {name} is of type {entry.dtype}, expected {', '.join(_FLOATS)}")
        row_bytes = entry.data.nbytes // shape[0]
        raw = entry.data[begin * row_bytes : end * row_bytes]
        if entry.dtype == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(np.float16 if entry.dtype == "F16" else np.float32).astype(np.float32)
        if not np.isfinite(values).all():
            raise ModelFileError(f"{entry.file}: tensor {name} holds values that are not finite")
        return values.reshape(end - begin, *shape[1:])

    def vector(self, name: str, length: int) -> Floats:
        """Return a one-dimensional tensor; raises as `rows` does."""
        return self.rows(name, (length,), 0, length)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files that hold the model's weights.

    Raises:
        ModelFileError: the index is unreadable.
    """
    index = folder / _INDEX
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelFileError(f"model file {index} is not a readable index: {error}") from error
    if not names:
        raise ModelFileError(f"{index} names no files")
    return [folder / name for name in names]


def _read_header(file: Path) -> Iterator[tuple[str, _Entry]]:
    data = _map(file)
    try:
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes()) if length <= _HEADER_MAX else None
    except (struct.error, ValueError) as error:
        raise ModelFileError(f"model file {file} is corrupt: its header is not readable") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"model file {file} is corrupt: its header is not an object")
    body = data[8 + length :]
    for name, item in header.items():
        if name != "__metadata__":
            yield name, _entry(file, body, name, item)


def _entry(file: Path, body: Bytes, name: str, item: Any) -> _Entry:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        size = int(np.prod(shape, dtype=np.int64)) * _DTYPE_BYTES[dtype]
    except KeyError as error:
        raise ModelFileError(f"{file}: tensor {name} has an unknown type or no {error}") from error
    except (TypeError, ValueError) as error:
        raise ModelFileError(f"{file}: tensor {name} has a corrupt entry") from error
    if not 0 <= begin <= end <= len(body) or end - begin != size:
        raise ModelFileError(f"{file}: tensor {name} lies at bytes {begin}..{end} of {len(body)}: cut short or corrupt")
    return _Entry(file, body[begin:end], dtype, shape)


def _map(file: Path) -> Bytes:
    try:
        with file.open("rb") as stream:
            return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except FileNotFoundError as error:
        raise ModelFileError(f"model file {file} is missing") from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"model file {file} is not readable: {error}") from error


_QUANTISED = {2: "Q4_0", 3: "Q4_1", 8: "Q8_0"}
"""ggml types whose blocks are used as they are."""
_BLOCKS = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    30: (1, 2),  # BF16
}
"""ggml type: elements and bytes of a block. Of others only the beginning of a tensor is checked."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix: `data` [rows, blocks of 32, bytes] of type Q4_0, Q4_1 or Q8_0."""

    kind: str
    data: Bytes


class Gguf:
    """The quantised matrices of a GGUF file (version 2 or 3, little endian), under GGUF's own names."""

    def __init__(self, file: Path) -> None:
        """Map the file and read its header.

        Raises:
            ModelFileError: not a GGUF, or cut short; the message names the file and the tensor if there is one.
        """
        self._file = file
        self._data = _map(file)
        self._at = 0
        self.architecture = ""
        self._blocks: dict[str, Blocks] = {}
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise ModelFileError(
                f"model file {file} is not a readable GGUF: {type(error).__name__} at byte {self._at}"
            ) from error

    def find(self, name: str, shape: tuple[int, int]) -> Blocks | None:
        """Return a matrix [rows, k]; None: not there, not quantised in a known way.

        Raises:
            ModelFileError: it has another shape.
        """
        blocks = self._blocks.get(name)
        if blocks is None:
            return None
        rows, k = blocks.data.shape[0], blocks.data.shape[1] * 32
        if (rows, k) != shape:
            raise ModelFileError(f"{self._file}: tensor {name} has shape {[rows, k]}, expected {list(shape)}")
        return blocks

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        (value,) = struct.unpack("<" + form, self._data[self._at : self._at + size].tobytes())
        self._at += size
        return int(value)

    def _text(self) -> str:
        size = self._number("Q")
        text = self._data[self._at : self._at + size].tobytes().decode()
        self._at += size
        return text

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            size = self._number("Q")
            self._at += size
        elif kind == _ARRAY:
            element, count = self._number("I"), self._number("Q")
            if element in _SIZES:
                self._at += _SIZES[element] * count
            else:
                for _ in range(count):
                    self._skip(element)
        else:
            self._at += _SIZES[kind]

    def _read(self) -> None:
        if self._data[:4].tobytes() != b"GGUF":
            raise ModelFileError(f"model file {self._file} is not a GGUF")
        self._at = 4
        self._number("I")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        alignment = 32
        for _ in range(num_fields):
            key, kind = self._text(), self._number("I")
            if key == "general.architecture" and kind == _STRING:
                self.architecture = self._text()
            elif key == "general.alignment":
                alignment = self._number("I")
            else:
                self._skip(kind)
        entries = []
        for _ in range(num_tensors):
            name = self._text()
            shape = [self._number("Q") for _ in range(self._number("I"))]
            entries.append((name, shape, self._number("I"), self._number("Q")))
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in entries:
            self._add(name, shape, kind, start + offset)

    def _add(self, name: str, shape: list[int], kind: int, begin: int) -> None:
        if begin > len(self._data):
            raise ModelFileError(f"{self._file}: tensor {name} begins beyond the end of the file: it is cut short")
        block, block_bytes = _BLOCKS.get(kind, (1, 0))
        end = begin + math.prod(shape) // block * block_bytes
        if end > len(self._data):
            raise ModelFileError(f"{self._file}: tensor {name} ends beyond the end of the file: it is cut short")
        if kind in _QUANTISED and len(shape) == 2 and shape[0] % 32 == 0:
            k, rows = shape
            self._blocks[name] = Blocks(_QUANTISED[kind], self._data[begin:end].reshape(rows, k // 32, block_bytes))
