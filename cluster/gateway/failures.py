"""Whose fault a failed attempt was: whom to leave out at the next one."""

from baton_pb.v1 import router_pb2
from cluster.gateway.decode_client import SessionLostError
from common.errors import BatonError, OverloadedError


class Failures:
    """The failed attempts of one request.

    A broken session is the decode worker's fault. A loss that the decode worker itself reports is its prefill worker's,
    unless it has none or has reported one before. A refusal for lack of room may be either one's.
    """

    def __init__(self) -> None:
        self.excluded: frozenset[str] = frozenset()
        """Workers not to try again."""
        self.last: BatonError | None = None
        self._reporters: set[str] = set()

    def add(self, error: BatonError, placement: router_pb2.WorkerPlacement) -> None:
        """Note that an attempt ended with `error`."""
        self.last = error
        self.excluded |= self._blame(error, placement)

    def _blame(self, error: BatonError, placement: router_pb2.WorkerPlacement) -> frozenset[str]:
        decode = frozenset({placement.decode_worker_id})
        if isinstance(error, SessionLostError) or not placement.HasField("prefill"):
            return decode
        prefill = frozenset({placement.prefill.worker_id})
        if isinstance(error, OverloadedError) or placement.decode_worker_id in self._reporters:
            return decode | prefill
        self._reporters.add(placement.decode_worker_id)
        return prefill
