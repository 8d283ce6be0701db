"""Workers that cache but never say so: their hits would always be 0, and nobody would know why."""

import logging
from collections import Counter

from common.logs import log

_LOG = logging.getLogger(__name__)

_ENDS_MAX = 16
"""Ended requests with at least one full block after which a worker that still has announced none is suspicious."""


class SilenceWatch:
    """Counts what must have left blocks. Owned by the router."""

    def __init__(self) -> None:
        self._ends: Counter[str] = Counter()

    def forget(self, worker_id: str) -> None:
        """A worker left."""
        self._ends.pop(worker_id, None)

    def is_silent(self, worker_id: str) -> bool:
        """Whether so many have ended there and nothing was announced."""
        return self._ends[worker_id] >= _ENDS_MAX

    def ended(self, worker_id: str, has_announced: bool) -> bool:
        """A request that left blocks has ended; return whether the worker is found to be silent, once."""
        if has_announced:
            self.forget(worker_id)
            return False
        self._ends[worker_id] += 1
        if self._ends[worker_id] != _ENDS_MAX:
            return False
        log(_LOG, logging.WARNING, "announces no cached block: placed as if it had none", worker_id=worker_id)
        return True
