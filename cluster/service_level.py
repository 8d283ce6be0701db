"""What a client asks of the service beside the answer: its class, and how soon tokens are wanted."""

import enum
import math
from dataclasses import dataclass

from baton_pb.v1 import common_pb2, inference_pb2
from common.errors import InvalidRequestError

TARGET_MAX_S = 86_400.0
"""Longest time that is a target."""


class Priority(enum.IntEnum):
    """Classes; the lowest is shed first."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The class of a request and its targets. None: whenever."""

    priority: Priority = Priority.NORMAL
    ttft_target_s: float | None = None
    """To the first token."""
    tpot_target_s: float | None = None
    """For each further token, on average."""


ORDINARY = ServiceLevel()
"""What is given to those who ask for nothing."""

_PRIORITIES_PB = {
    Priority.HIGH: common_pb2.PRIORITY_HIGH,
    Priority.NORMAL: common_pb2.PRIORITY_NORMAL,
    Priority.LOW: common_pb2.PRIORITY_LOW,
}
_PRIORITIES = {number: priority for priority, number in _PRIORITIES_PB.items()} | {
    common_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL
}


def priority_to_pb(priority: Priority) -> "common_pb2.Priority.ValueType":
    """Encode a class."""
    return _PRIORITIES_PB[priority]


def priority_from_pb(priority: "common_pb2.Priority.ValueType") -> Priority:
    """Decode a class; none is normal.

    Raises:
        InvalidRequestError: a number that is no class.
    """
    found = _PRIORITIES.get(priority)
    if found is None:
        raise InvalidRequestError(f"priority must be high, normal or low, got number {priority}")
    return found


def level_from_pb(message: inference_pb2.GenerateRequest) -> ServiceLevel:
    """Check what a request asks for.

    Raises:
        InvalidRequestError: naming the field, its limit and the value.
    """
    return ServiceLevel(
        priority_from_pb(message.priority),
        _target("ttft_target_s", message.ttft_target_s) if message.HasField("ttft_target_s") else None,
        _target("tpot_target_s", message.tpot_target_s) if message.HasField("tpot_target_s") else None,
    )


def _target(name: str, seconds: float) -> float:
    if not (math.isfinite(seconds) and 0 < seconds <= TARGET_MAX_S):
        raise InvalidRequestError(f"{name} must be in (0, {TARGET_MAX_S:g}], got {seconds}")
    return seconds
