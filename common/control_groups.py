"""The control groups around this process, which containers are limited by, and the cores that they leave it."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def group_files(controller: str, new: tuple[str, str], old: tuple[str, str], root: Path = ROOT) -> Iterator[list[str]]:
    """Yield the contents of two files of each group around this process; groups that do not have both do not limit.

    Args:
        controller: e.g. `memory`.
        new: their names where control groups are of version 2.
        old: their names in version 1; two equal names are one file.
        root: where `proc` and `sys` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(root / "sys/fs/cgroup", path, new)
        elif controller in controllers.split(","):
            yield from _upwards(root / "sys/fs/cgroup" / controller, path, old)


def _upwards(mount: Path, path: str, names: tuple[str, str]) -> Iterator[list[str]]:
    group = PurePosixPath(path)
    for each in (group, *group.parents):
        folder = mount / each.relative_to("/")
        try:
            yield [(folder / name).read_text().strip() for name in names]
        except OSError:  # no such group seen from in here
            continue


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this thread may keep busy: those that it may run on, within its groups' quotas; at least 1.

    Args:
        root: where `proc` and `sys` are.
    """
    cores = len(os.sched_getaffinity(0))
    for first, second in group_files("cpu", ("cpu.max",) * 2, ("cpu.cfs_quota_us", "cpu.cfs_period_us"), root):
        quota, period = f"{first} {second}".split()[:2]  # version 2 has both in one file
        if quota not in ("max", "-1"):
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)
