"""How much memory a new process may take: what the machine has left, within the limits of its control groups."""

from collections.abc import Iterator
from pathlib import Path

from common.control_groups import group_files
from common.errors import ConfigError

_UNLIMITED = 1 << 60
"""Control groups of the first version say "no limit" with a number near 2^63."""


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken without swapping or being killed.

    Args:
        root: where `proc` and `sys` are.

    Raises:
        ConfigError: the machine does not say.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"cannot find out how much memory is free, set engine.pool_mib: {error!r}") from error
    return max(0, min([available, *_group_rooms(root)]))


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield what each control group around this process still allows; what cannot be read does not limit."""
    new, old = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for limit, used in group_files("memory", new, old, root):
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:  # else "max"
            yield int(limit) - int(used)
