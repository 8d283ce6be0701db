"""Compile the simulator, and what it runs of router and workers, to machine code: `make compiled`.

`build/compiled` becomes a copy of the packages in which mypyc (it comes with mypy and needs a C compiler) has made
extension modules of those in which simulations spend their time. It is for simulations only:
`PYTHONPATH=build/compiled .venv/bin/baton simulate …`. Pure Python stays what tests and clusters run; at the end both
simulate the same workload, and must give the same records.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / "build" / "compiled"
PACKAGES = ("baton_pb", "cluster", "common", "decode", "engine", "loadtest", "prefill")
_WHOLE = ("cluster/router", "loadtest/simulator")
"""Folders of which all modules are compiled but those that speak protobuf or pydantic."""
_SPEAKING = ("baton_pb", "pydantic", "common.config_node", "loadtest.simulator.probe")
_SINGLE = (
    "decode/chunk_budget.py",
    "decode/scheduler.py",
    "engine/block_pool.py",
    "engine/bookkeeping.py",
    "engine/cache_log.py",
    "loadtest/content.py",
    "loadtest/records.py",
    "prefill/scheduler.py",
)
_SETUP = """\
from mypyc.build import mypycify
from setuptools import setup

setup(name="compiled", packages=[], ext_modules=mypycify({arguments!r}))
"""
_TRIAL = (
    "--profile=h100-8b",
    "--prefill=4",
    "--decode=4",
    "--sessions=300",
    "--arrival=poisson:rate=12",
    "--workload=conversation:turns=4,system_tokens=512,systems=3,user_tokens=2000,output_tokens=200,spread=0.5",
)


def main() -> None:
    """Make `build/compiled` anew, and check it; the file `checked` says that both went well.

    Raises:
        subprocess.CalledProcessError: a module cannot be compiled, or there is no C compiler.
        SystemExit: the compiled simulator gives other records.
    """
    shutil.rmtree(COMPILED, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, COMPILED / package, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = ["--config-file", str(ROOT / "pyproject.toml"), *modules()]
    (COMPILED / "setup.py").write_text(_SETUP.format(arguments=arguments))
    _python(COMPILED, "setup.py", "--quiet", "build_ext", "--inplace")
    shutil.rmtree(COMPILED / "build")
    if records_of(ROOT) != records_of(COMPILED):
        sys.exit("the compiled simulator gives other records: do not use it")
    (COMPILED / "checked").touch()


def modules() -> Iterator[str]:
    """Yield what is compiled, paths from the root."""
    for folder in _WHOLE:
        for path in sorted((ROOT / folder).glob("[!_]*.py")):
            text = path.read_text()
            if not any(f"from {name}" in text or f"import {name}" in text for name in _SPEAKING):
                yield str(path.relative_to(ROOT))
    yield from _SINGLE


def records_of(tree: Path) -> object:
    """Return the records of a short simulation by the packages of a tree."""
    output = COMPILED / "trial.json"
    _python(tree, "-m", "loadtest.cli", "simulate", *_TRIAL, "--output", str(output))
    return json.loads(output.read_text())["requests"]


def _python(folder: Path, *arguments: str) -> None:
    command = ["env", f"PYTHONPATH={folder}", sys.executable, *arguments]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
