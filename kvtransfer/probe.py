"""How fast a new connection is: measured once for each pair, so that a slow path is noticed before users notice it."""

import secrets
from typing import NamedTuple

from baton_pb.v1 import transfer_pb2

PROBE_BYTES = 4 * 1024 * 1024
"""At most, and no more than the sender's pool has; one smaller than a quarter of this is not worth measuring."""
NUM_PROBES = 2
"""The first one warms pages and windows up."""


class Expectation(NamedTuple):
    """What an operator expects of connections; see `transfer.expected_mb_s`."""

    bytes_per_s: float
    is_strict: bool


def probe_bytes(pool_bytes: int) -> int:
    """Return how much to move; 0: nothing that tells anything."""
    return min(pool_bytes, PROBE_BYTES) if pool_bytes >= PROBE_BYTES // 4 else 0


def probe_frame(num_bytes: int) -> transfer_pb2.Probe:
    """Return a request, with a tag that nothing else has."""
    return transfer_pb2.Probe(num_bytes=num_bytes, tag=secrets.randbits(64))


def rate_of(probe: transfer_pb2.Probe) -> float:
    """Return bytes per second of an answer; whatever the peer says of the time, the result is finite."""
    return probe.num_bytes / max(probe.seconds, 1e-6)


def scratch(num_bytes: int) -> memoryview:
    """Return memory to send a probe from or to receive it in, with its pages in place and nothing in it."""
    return memoryview(bytearray(b"\xff" * num_bytes))
