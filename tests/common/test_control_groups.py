"""The cores that a process may keep busy are those that it may run on, within the quotas of its control groups."""

import os
from pathlib import Path

import pytest

from common.control_groups import usable_cores

HERE = len(os.sched_getaffinity(0))


def root_of(folder: Path, groups: str, files: dict[str, str]) -> Path:
    """Write a root with the process's control groups and their files."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = folder / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("0::/a\n", {}, HERE, id="no quota known"),
        pytest.param("0::/a\n", {"a/cpu.max": "max 100000\n"}, HERE, id="no quota"),
        pytest.param("0::/a\n", {"a/cpu.max": "100000 100000\n"}, 1, id="one core"),
        pytest.param("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1, id="half a core"),
        pytest.param("0::/a\n", {"a/cpu.max": "6400000 100000\n"}, HERE, id="more than there are"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 1\n", "a/cpu.max": "150 100\n"}, 1, id="an outer group's"),
        pytest.param(
            "4:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            1,
            id="version 1",
        ),
        pytest.param(
            "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "1\n"}, HERE, id="version 1, none"
        ),
    ],
)
def test_cores_are_those_that_affinity_and_quotas_leave(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    assert usable_cores(root_of(tmp_path, groups, files)) == expected


def test_a_machine_without_control_groups_has_all_its_cores(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == HERE
