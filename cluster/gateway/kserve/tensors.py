"""Tensors of the Open Inference Protocol <-> lists of Python values."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from baton_pb.kserve import inference_pb2 as kserve_pb2
from common.errors import InvalidRequestError

Value = bool | int | float | str
VALUES_MAX = 1024
"""Most values of one tensor."""


class _Kind(NamedTuple):
    """How values of one datatype are written."""

    contents: str
    """The field of InferTensorContents."""
    code: str
    """Of `struct`, little endian; empty: a length of four bytes and so many bytes."""


_KINDS = {
    "BOOL": _Kind("bool_contents", "?"),
    "INT8": _Kind("int_contents", "b"),
    "INT16": _Kind("int_contents", "h"),
    "INT32": _Kind("int_contents", "i"),
    "INT64": _Kind("int64_contents", "q"),
    "UINT8": _Kind("uint_contents", "B"),
    "UINT16": _Kind("uint_contents", "H"),
    "UINT32": _Kind("uint_contents", "I"),
    "UINT64": _Kind("uint64_contents", "Q"),
    "FP32": _Kind("fp32_contents", "f"),
    "FP64": _Kind("fp64_contents", "d"),
    "BYTES": _Kind("bytes_contents", ""),
}


class Tensor(NamedTuple):
    """What is sent back."""

    name: str
    datatype: str
    values: Sequence[Value]


def read_inputs(request: kserve_pb2.ModelInferRequest) -> dict[str, list[Value]]:
    """Return the values of each input, by name.

    Raises:
        InvalidRequestError: an unknown datatype, contents that are not what the shape says, a name that comes twice.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(f"raw_input_contents must be one for each of {len(request.inputs)}, got {len(raw)}")
    found: dict[str, list[Value]] = {}
    for number, tensor in enumerate(request.inputs):
        if tensor.name in found:
            raise InvalidRequestError(f"inputs[{number}].name is {tensor.name!r}, as that of another input")
        found[tensor.name] = _read(number, tensor, raw[number] if raw else None)
    return found


def _read(number: int, tensor: kserve_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None) -> list[Value]:
    kind = _KINDS.get(tensor.datatype)
    if kind is None:
        raise InvalidRequestError(f"inputs[{number}].datatype must be one of {', '.join(_KINDS)}")
    if "shared_memory_region" in tensor.parameters:
        raise InvalidRequestError(
            f"inputs[{number}].parameters has shared_memory_region: there is no shared memory here"
        )
    count = _count(number, tensor.shape)
    values = list(getattr(tensor.contents, kind.contents)) if raw is None else _unpacked(number, kind, raw, count)
    if len(values) != count:
        raise InvalidRequestError(f"inputs[{number}] must have {count} values as its shape says, got {len(values)}")
    return [_text(number, value) if isinstance(value, bytes) else value for value in values]


def _count(number: int, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
        if not 0 <= count <= VALUES_MAX:
            raise InvalidRequestError(f"inputs[{number}].shape must be of at most {VALUES_MAX} values, got {count}")
    return count


def _unpacked(number: int, kind: _Kind, raw: bytes, count: int) -> list[bytes | bool | int | float]:
    if kind.code:
        size = struct.calcsize(f"<{kind.code}")
        if len(raw) != count * size:
            raise InvalidRequestError(f"raw_input_contents[{number}] must have {count * size} bytes, got {len(raw)}")
        return list(struct.unpack(f"<{count}{kind.code}", raw))
    parts: list[bytes | bool | int | float] = []
    at = 0
    while at < len(raw) and len(parts) <= count:
        if at + 4 > len(raw) or at + 4 + (size := int.from_bytes(raw[at : at + 4], "little")) > len(raw):
            raise InvalidRequestError(f"raw_input_contents[{number}] is cut short")
        parts.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return parts


def _text(number: int, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"inputs[{number}] must be UTF-8: {error.reason}") from error


def add_outputs(response: kserve_pb2.ModelInferResponse, tensors: Sequence[Tensor], is_raw: bool) -> None:
    """Write tensors into a response, as raw bytes or as contents."""
    for tensor in tensors:
        kind = _KINDS[tensor.datatype]
        output = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.values)])
        values = [value.encode() if isinstance(value, str) else value for value in tensor.values]
        if is_raw:
            response.raw_output_contents.append(b"".join(_packed(kind, value) for value in values))
        else:
            getattr(output.contents, kind.contents).extend(values)


def _packed(kind: _Kind, value: bytes | bool | int | float) -> bytes:
    if isinstance(value, bytes):
        return len(value).to_bytes(4, "little") + value
    return struct.pack(f"<{kind.code}", value)
