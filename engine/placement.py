"""On which cores and with which priority a worker's compute threads run.

Both are properties of single threads in Linux and go over to the threads that a thread starts: set at the beginning of
the thread that loads the model and of the one that runs the steps, they hold for all that compute, and for nothing else
in the process.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from common.errors import ConfigError

_NICE_MAX = 19


class Placement(NamedTuple):
    """The default changes nothing."""

    cores: frozenset[int] = frozenset()
    """Empty: any that the process may run on."""
    nice: int = 0
    """Added to the process's own."""

    @classmethod
    def of(cls, worker_id: str, cores: Sequence[int], threads: int, nice: int) -> "Placement":
        """Give a worker its own cores.

        Args:
            worker_id: its number among those of its role follows the last dash.
            cores: of the role: worker 0 gets the first `threads` of them, worker 1 the next, and so on, in a circle.
            threads: of one worker; 0: every worker gets all.
            nice: added to the process's own, which the kernel takes for a smaller share of a contended core.

        Raises:
            ConfigError: the process may not run on one of them.
        """
        allowed = os.sched_getaffinity(0)
        if beyond := sorted(set(cores) - allowed):
            raise ConfigError(f"cores {beyond} of {worker_id} are not among those it may run on: {sorted(allowed)}")
        if not cores or threads == 0:
            return cls(frozenset(cores), nice)
        number = int(worker_id.rpartition("-")[2]) if worker_id.rpartition("-")[2].isdigit() else 0
        own = [cores[(number * threads + i) % len(cores)] for i in range(threads)]
        return cls(frozenset(own), nice)

    def take(self) -> None:
        """Put the calling thread there."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.nice:
            os.setpriority(os.PRIO_PROCESS, 0, min(_NICE_MAX, os.getpriority(os.PRIO_PROCESS, 0) + self.nice))
