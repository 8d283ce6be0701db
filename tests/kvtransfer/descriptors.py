"""What this process has open."""

import gc
from pathlib import Path


def num_descriptors() -> int:
    """Return how many descriptors are open."""
    gc.collect()  # what earlier tests left
    return len(list(Path("/proc/self/fd").iterdir()))
