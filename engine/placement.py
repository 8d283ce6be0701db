"""On which cores and with which priority a worker's compute threads run.

Both are properties of single threads in Linux and go over to the threads that a thread starts: set at the beginning of
the thread that loads the model and of the one that runs the steps, they hold for all that compute, and for nothing else
in the process.
"""

import os
import socket
from collections.abc import Sequence

from common.errors import ConfigError

SCOPE = "baton"
_NICE_MAX = 19


class Placement:
    """Cores that one worker has for itself, until `release`, and a priority. The default changes nothing.

    Which worker runs on which host is Ray's choice, so the workers of a host settle it among themselves, whatever their
    roles: who pins itself to a core holds a socket that is named after it, which the kernel lets exist once on a host
    (in a network namespace) and closes when its process ends, however it ends.
    """

    def __init__(self, nice: int = 0, scope: str = SCOPE) -> None:
        """Hold nothing yet.

        Args:
            nice: added to the process's own, which the kernel takes for a smaller share of a contended core.
            scope: workers of another one do not count.
        """
        self.nice = nice
        self._scope = scope
        self._held: dict[int, socket.socket] = {}

    @property
    def cores(self) -> frozenset[int]:
        """Empty: any that the process may run on."""
        return frozenset(self._held)

    @classmethod
    def of(cls, worker_id: str, cores: Sequence[int], threads: int, nice: int, scope: str = SCOPE) -> "Placement":
        """Give a worker its own cores.

        Args:
            worker_id: for messages.
            cores: of its role, maybe of other roles too; it gets the first that no worker of this host has. Empty: any.
            threads: as many cores, all of them at most; 0: all.
            nice: of the threads.
            scope: see Placement.

        Raises:
            ConfigError: the process may not run on one of them, or other workers leave too few; it has none then.
        """
        allowed = os.sched_getaffinity(0)
        if beyond := sorted(set(cores) - allowed):
            raise ConfigError(f"cores {beyond} of {worker_id} are not among those it may run on: {sorted(allowed)}")
        distinct = dict.fromkeys(cores)
        wanted = min(threads or len(distinct), len(distinct))
        placement = cls(nice, scope)
        taken = [core for core in distinct if len(placement.cores) < wanted and not placement.hold(core)]
        if len(placement.cores) < wanted:
            placement.release()
            raise ConfigError(
                f"{worker_id} needs {wanted} of the cores {list(distinct)}, and other workers of this host are pinned "
                f"to {taken}: list more cores, start fewer workers, or lower engine.threads"
            )
        return placement

    def hold(self, core: int) -> bool:
        """Take a core; False: another worker of this user has it."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0{self._scope}-{os.getuid()}-core-{core}")
        except OSError:
            name.close()
            return False
        self._held[core] = name
        return True

    def take(self) -> None:
        """Put the calling thread there."""
        if self._held:
            os.sched_setaffinity(0, self._held)
        if self.nice:
            os.setpriority(os.PRIO_PROCESS, 0, min(_NICE_MAX, os.getpriority(os.PRIO_PROCESS, 0) + self.nice))

    def release(self) -> None:
        """Let others have the cores; no thread computes any more. Idempotent."""
        for name in self._held.values():
            name.close()
        self._held.clear()
