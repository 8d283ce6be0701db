"""What all benchmarks share: rows, the table for people, and `build/bench/<name>.json` for programs."""

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path("build/bench")
_WIDTH = 180
"""Of a table that goes to a file or a pipe."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measured number, beside a peer's where there is one."""

    name: str
    ours: float
    unit: str
    is_higher_better: bool
    peer: float | None = None
    """None: no peer, or it could not be run; the note says why."""
    peer_name: str | None = None
    goal: float | None = None
    """Of `ours`: at least that much where higher is better, at most that much elsewhere."""
    spread: float | None = None
    """(largest - smallest) / median over the repetitions."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Return how many times better than the peer we are; below 1 it is better."""
        if self.peer is None or not self.peer or not self.ours:
            return None
        return self.ours / self.peer if self.is_higher_better else self.peer / self.ours

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.ours >= self.goal if self.is_higher_better else self.ours <= self.goal

    def as_json(self) -> dict[str, Any]:
        """Return the row in the format of the file."""
        return {
            "name": self.name,
            "ours": self.ours,
            "peer": self.peer,
            "peer_name": self.peer_name,
            "unit": self.unit,
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
            "spread": self.spread,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Repeated:
    """A number measured several times."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Repeated":
        """Return median and relative spread of at least one value."""
        median = statistics.median(values)
        return cls(median, (max(values) - min(values)) / median if median else 0.0)


def publish(name: str, rows: Sequence[BenchRow], folder: Path = FOLDER) -> Path:
    """Print the table and write the file.

    Args:
        name: of the benchmark and its file.
        rows: the results.
        folder: where to; made if missing.

    Returns:
        The file's path.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(_table(name, rows))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    tree = {"machine": machine(), "commit": commit(), "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(tree, indent=2) + "\n")
    return path


def machine() -> str:
    """Return processor, cores and interpreter in one line."""
    cpu = platform.processor() or platform.machine()
    cores = 0
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                cpu, cores = value.strip(), cores + 1
    except OSError:
        pass  # not Linux: the generic name has to do
    return f"{cpu}, {cores or '?'} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def commit() -> str:
    """Return the commit that is checked out, marked when files differ from it; `unknown` outside a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _table(name: str, rows: Sequence[BenchRow]) -> Table:
    table = Table(title=name, title_justify="left")
    for column in ("", "ours", "peer", "unit", "ratio", "goal", "spread", "note"):
        table.add_column(column, justify="left" if column in ("", "unit", "note") else "right")
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.4g} {'met' if row.met else 'missed'}"
        peer = "" if row.peer is None else f"{row.peer:.4g} {row.peer_name}"
        table.add_row(
            row.name,
            f"{row.ours:.4g}",
            peer,
            row.unit,
            "" if row.ratio is None else f"{row.ratio:.2f}x",
            goal,
            "" if row.spread is None else f"{row.spread:.0%}",
            row.note,
        )
    return table
