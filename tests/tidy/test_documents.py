"""Documents tell the truth about the repository: every path they name exists, and they stay readable in one sitting."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]
FOLDERS = (
    "baton_pb", "cluster", "common", "decode", "deploy", "docs", "engine", "kvtransfer", "loadtest", "prefill", "proto",
    "tests", "tools", ".ci",
)  # fmt: skip
# A path in backquotes or in a link: begins with one of our folders, or is a file in the root.
PATH = re.compile(rf"(?<=[`(\[])(?:(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./{{}},-]*|Makefile|requirements\.lock)")
ARCHITECTURE_LINES_MAX = 250


def expand(path: str) -> list[str]:
    """Return the paths that `a/{b,c}.py` stands for."""
    match = re.search(r"\{([^}]*)\}", path)
    if match is None:
        return [path]
    return [p for part in match[1].split(",") for p in expand(path[: match.start()] + part + path[match.end() :])]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_named_exists(document: Path) -> None:
    named = {p.rstrip(".,") for match in PATH.finditer(document.read_text()) for p in expand(match[0])}

    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_test_named_exists() -> None:
    named = {m for d in DOCUMENTS for m in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", d.read_text())}

    assert named
    assert {(path, test) for path, test in named if f"def {test}(" not in (ROOT / path).read_text()} == set()


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {m for d in DOCUMENTS for m in re.findall(r"`make ([a-z-]+)", d.read_text())}

    assert named - targets == set()


def test_the_architecture_fits_its_size() -> None:
    assert len((ROOT / "docs/ARCHITECTURE.md").read_text().splitlines()) <= ARCHITECTURE_LINES_MAX


def test_the_license_is_apache_2() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
