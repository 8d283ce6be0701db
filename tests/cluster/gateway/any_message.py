"""Any protobuf message whatever: a hypothesis strategy made from a message's descriptor."""

import math
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_DEPTH_MAX = 4
_FIELDS_MAX = 5
_ITEMS_MAX = 3
_TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["fake", "hello", "user", "true", "1", "{}", '{"max_tokens": 3}', "text_input", "BYTES", "INT32"]),
)


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 5), st.sampled_from([low, high]), st.integers(low, high))


_FLOATS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -1.0, math.nan, math.inf, 3e38]), st.floats(width=32))
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: _integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: _integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: _integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: _integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_ENUM: _integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_STRING: _TEXTS,
    FieldDescriptor.TYPE_BYTES: st.one_of(st.binary(max_size=12), _TEXTS.map(str.encode)),
}


class TimeIsUpError(Exception):
    """Ends a search that has had its time; it has found nothing."""


def any_message(base: Message) -> st.SearchStrategy[Any]:
    """Return messages of `base`'s kind: some start as `base`, some empty, and then any fields get any values."""
    descriptor: Any = base.DESCRIPTOR  # the stubs name two types
    return st.one_of(_made(descriptor, base, 0), _made(descriptor, None, 0))


@st.composite
def _made(draw: st.DrawFn, descriptor: Descriptor, base: Message | None, depth: int) -> Message:
    made: Message = GetMessageClass(descriptor)()
    if base is not None:
        made.CopyFrom(base)
    if not descriptor.fields:
        return made
    fields = st.lists(st.sampled_from(list(descriptor.fields)), max_size=_FIELDS_MAX, unique_by=lambda f: f.number)
    for field in draw(fields):
        if depth < _DEPTH_MAX or field.message_type is None:
            _fill(draw, made, field, depth)
    return made


def _fill(draw: st.DrawFn, made: Message, field: FieldDescriptor, depth: int) -> None:
    value: Any = getattr(made, field.name)
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        _fill_map(draw, value, inner, depth)
    elif inner is not None:
        one = _made(inner, None, depth + 1)
        if field.is_repeated:
            value.extend(draw(st.lists(one, max_size=_ITEMS_MAX)))
        else:
            value.CopyFrom(draw(one))
    elif field.is_repeated:
        value.extend(draw(st.lists(_SCALARS[field.type], max_size=_ITEMS_MAX)))
    else:
        setattr(made, field.name, draw(_SCALARS[field.type]))


def _fill_map(draw: st.DrawFn, value: Any, entry: Descriptor, depth: int) -> None:
    key, content = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for name in draw(st.lists(_SCALARS[key.type], max_size=_ITEMS_MAX)):
        if content.message_type is None:
            value[name] = draw(_SCALARS[content.type])
        else:
            value[name].CopyFrom(draw(_made(content.message_type, None, depth + 1)))
