"""What it takes to read a serialized protobuf message, told from its bytes before anything is read."""

from google.protobuf.descriptor import Descriptor

_VARINT_BYTES_MAX = 10
_LONG = 0x80
"""A number's byte that has others behind it."""


def has_more_fields(data: bytes, kind: Descriptor | None, most: int) -> bool:
    """Return whether a message has more fields than `most`, those of the messages in it included.

    A parser spends as long on an empty message in a list as on kilobytes of text, and nothing interrupts it. This stops
    as soon as it knows, and others run meanwhile. It takes nothing for a fault: what is no message the parser refuses.

    Args:
        data: the message.
        kind: what it is; None: only its own fields are known.
        most: how many it may have.
    """
    left, parts = most, [(0, len(data), kind)]
    try:
        while parts:
            at, end, kind = parts.pop()
            known = {} if kind is None else kind.fields_by_number
            while at < end:
                left -= 1
                if left < 0:
                    return True
                key = data[at]
                at += 1
                if key >= _LONG:
                    key, at = _varint(data, at - 1)
                match key & 7:
                    case 2:
                        size = data[at]
                        at += 1
                        if size >= _LONG:
                            size, at = _varint(data, at - 1)
                        field = known.get(key >> 3)
                        if size and field is not None and field.message_type is not None:
                            parts.append((at, min(end, at + size), field.message_type))
                        at += size
                    case 0:
                        _, at = _varint(data, at)
                    case 1:
                        at += 8
                    case 5:
                        at += 4
                    case _:
                        pass  # a group begins or ends: what is in it is read as if it stood beside it
    except IndexError:
        pass  # cut off
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, at
