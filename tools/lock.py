"""Write requirements.lock: pyproject's dependencies and all that they need, at the versions installed in this venv.

Run it with the venv's Python after changing a dependency: `.venv/bin/python tools/lock.py`.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Every package of the development environment at one version. Made by tools/lock.py; installed by `make install`.
# torch 2.13.0: one version for CI and laptops. Where a CPU build of it is at hand pip takes that one.
"""


def wanted() -> list[Requirement]:
    """Return what pyproject.toml asks for: run time and the `dev` extra. Not `gpu`: CI cannot install or run it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["dev"]]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Return {name: version} of `requirements` and of everything below them that is installed.

    Raises:
        metadata.PackageNotFoundError: one that pyproject asks for is not installed.
    """
    pinned: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in requirements if _applies(requirement, "")]
    for requirement, _ in waiting:
        metadata.version(requirement.name)
    while waiting:
        requirement, _ = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ["", *sorted(requirement.extras)]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                pinned[name] = metadata.version(name).partition("+")[0]
            except metadata.PackageNotFoundError:
                continue  # for another platform or build, e.g. CUDA libraries below a CPU build of torch
            waiting += [(below, extra) for below in _below(name) if _applies(below, extra)]
    return pinned


def _below(name: str) -> Iterator[Requirement]:
    return (Requirement(line) for line in metadata.requires(name) or ())


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def main() -> None:
    """Write the file."""
    lines = [f"{name}=={version}\n" for name, version in sorted(closure(wanted()).items())]
    (ROOT / "requirements.lock").write_text(HEADER + "".join(lines))
    sys.stdout.write(f"requirements.lock: {len(lines)} packages\n")


if __name__ == "__main__":
    main()
