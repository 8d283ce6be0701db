"""Free memory is the smallest of what the machine and each control group around the process leave."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from engine.free_memory import free_memory_bytes

MIB = 1024 * 1024


def machine(root: Path, groups: str, **files: str) -> Path:
    """Write a root with 1,000 MiB available, the process's control groups, and their files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 4096000 kB\nMemAvailable:   {1000 * 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/a\n", a__memory_DOT_max="max\n", a__memory_DOT_current="5\n")

    assert free_memory_bytes(root) == 1000 * MIB


@pytest.mark.parametrize(
    ("own", "outer", "expected"), [(300, 900, 200), (900, 300, 200), (2000, 3000, 1000), (50, 900, 0)]
)
def test_the_tightest_group_of_version_2_limits(tmp_path: Path, own: int, outer: int, expected: int) -> None:
    files: dict[str, str] = {}
    for group, limit in (("a__b", own), ("a", outer)):
        files |= {f"{group}__memory_DOT_max": f"{limit * MIB}\n", f"{group}__memory_DOT_current": f"{100 * MIB}\n"}

    assert free_memory_bytes(machine(tmp_path, "0::/a/b\n", **files)) == expected * MIB


def test_groups_of_version_1_limit_too(tmp_path: Path) -> None:
    files = {
        "memory__x__memory_DOT_limit_in_bytes": str(400 * MIB),
        "memory__x__memory_DOT_usage_in_bytes": str(150 * MIB),
        "memory__memory_DOT_limit_in_bytes": str(9223372036854771712),
        "memory__memory_DOT_usage_in_bytes": str(150 * MIB),
    }

    assert free_memory_bytes(machine(tmp_path, "9:name=systemd:/\n4:memory:/x\n0::/\n", **files)) == 250 * MIB


def test_a_machine_that_does_not_say_wants_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set engine\.pool_mib"):
        free_memory_bytes(tmp_path)
