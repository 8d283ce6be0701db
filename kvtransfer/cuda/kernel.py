"""The copy kernel's source, and how many threads it gets."""

import math
from pathlib import Path
from typing import NamedTuple

from kvtransfer.pieces import Runs

SOURCE = Path(__file__).parent / "csrc" / "paged_copy.cu"
NAME = "baton_copy_runs"
OPTIONS = ("-std=c++17",)
THREADS = 256
_THREAD_BYTES = 64
"""Four words of 16 bytes, the kernel's unrolled step."""
_TILES_MAX = 64
_GRID_Y_MAX = 65535
"""CUDA's own limit."""


class Launch(NamedTuple):
    """The grid of one launch: tiles of a run, and runs; each of `THREADS` threads."""

    grid_x: int
    grid_y: int

    @classmethod
    def of(cls, runs: Runs) -> "Launch":
        """Return the grid for some runs, at least one: enough for the average one, and longer ones loop."""
        tiles = math.ceil(runs.num_bytes / len(runs) / (THREADS * _THREAD_BYTES))
        return cls(max(1, min(tiles, _TILES_MAX)), min(len(runs), _GRID_Y_MAX))
