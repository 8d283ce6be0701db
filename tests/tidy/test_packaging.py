"""The repository's own rules about packages: names that nobody else has, no Python in proto/, empty __init__ files."""

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["importlinter"]["root_packages"]
LINES_MAX = 400


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_proto_holds_no_python() -> None:
    assert [path for path in (ROOT / "proto").rglob("*") if path.suffix in (".py", ".pyi")] == []


def test_no_installed_distribution_owns_one_of_our_names() -> None:
    owners = {name: metadata.packages_distributions().get(name, []) for name in [*PACKAGES, "tests", "tools", "deploy"]}

    assert {name: who for name, who in owners.items() if set(who) - {"baton-serve"}} == {}


@pytest.mark.parametrize("path", [p for p in python_files(*PACKAGES) if p.name == "__init__.py"], ids=str)
def test_init_files_hold_a_docstring_and_no_code(path: Path) -> None:
    body = ast.parse(path.read_text()).body

    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_every_package_is_typed() -> None:
    folders = [path.parent for path in python_files(*PACKAGES) if path.name == "__init__.py"]

    assert [folder for folder in folders if not (folder / "py.typed").exists()] == []


def test_no_module_is_longer_than_it_should_be() -> None:
    folders = [name for name in PACKAGES if name != "baton_pb"]
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in python_files(*folders, "tools")}

    assert {path: lines for path, lines in sizes.items() if lines > LINES_MAX} == {}


def test_relative_order_of_folders_is_what_pyproject_packages() -> None:
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == PACKAGES


def test_the_lock_pins_everything_that_pyproject_asks_for_within_its_bounds() -> None:
    project = PYPROJECT["project"]
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}

    for line in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), line


def test_the_lock_names_no_place_on_some_machine() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", line)] == []


def test_generated_code_is_compared_with_the_protocol_by_make_check() -> None:
    makefile = (ROOT / "Makefile").read_text()
    check = makefile[makefile.index("\ncheck:") :].split("\n\n")[0]

    for tool in ("ruff format --check", "ruff check", "mypy", "lint-imports", "tools/protoc.sh --check"):
        assert tool in check


def test_ci_runs_what_people_run() -> None:
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make check test")
