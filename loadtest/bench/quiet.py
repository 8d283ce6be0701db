"""Whether a machine was quiet while something was measured: what other processes used of its cores."""

import os
import time
from pathlib import Path
from typing import NamedTuple

QUIET_BELOW = 0.05
"""Share of all cores that others may use; above it a measurement counts as disturbed."""
_TICKS = os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Of /proc/stat's first line: user, nice, system, irq, softirq, and what the host took away (steal)."""


class CpuUse(NamedTuple):
    """CPU time used so far, seconds of one core, at a moment of `time.perf_counter`."""

    at_s: float
    machine_s: float
    own_s: float

    @classmethod
    def now(cls, process_ids: list[int]) -> "CpuUse":
        """Take a reading; `process_ids` and this process are what is being measured, the rest are others."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        busy = sum(int(fields[i]) for i in _BUSY_FIELDS) / _TICKS
        own = sum(_process_s(process_id) for process_id in (os.getpid(), *process_ids))
        return cls(time.perf_counter(), busy, own)

    def others_until(self, later: "CpuUse") -> float:
        """Return the share of all cores that other processes used between two readings, 0 to 1."""
        others = (later.machine_s - self.machine_s) - (later.own_s - self.own_s)
        return max(0.0, others / ((later.at_s - self.at_s) * (os.cpu_count() or 1)))


def _process_s(process_id: int) -> float:
    """CPU time of a process with its threads and the children that it has waited for; 0 once it is gone."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return sum(int(field) for field in fields[11:15]) / _TICKS
