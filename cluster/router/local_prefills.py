"""Prompts that decode workers prefill although there should be others for that: counted, and said when it begins."""

import logging
from collections import Counter

from cluster.router.worker import Role
from cluster.router.worker_table import WorkerTable
from common.logs import log

_LOG = logging.getLogger(__name__)


class LocalPrefills:
    """Counts into the router's counters. Owned by the router."""

    def __init__(self, workers: WorkerTable, counters: Counter[str]) -> None:
        self._workers = workers
        self._counters = counters
        self._has_fallen_back = False

    def apart(self) -> None:
        """A prefill worker prefills."""
        self._has_fallen_back = False

    def local(self, request_id: str, was_forced: bool) -> None:
        """A decode worker prefills: chosen, or for want of prefill workers."""
        if self._workers.num_configured(Role.PREFILL) == 0:
            return
        if not was_forced:
            self._counters["local_prefills_chosen"] += 1
            return
        self._counters["local_prefill_fallback"] += 1
        if not self._has_fallen_back:
            self._has_fallen_back = True
            states = self._workers.states(Role.PREFILL)
            log(
                _LOG,
                logging.WARNING,
                f"no prefill worker can be used ({states}): decode workers prefill; counted as local_prefill_fallback",
                request_id=request_id,
            )
