"""What is built holds what runs: sources that are compiled on first use, texts and profiles, every module."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    packages = {name.split("/")[0] for name in names if name.endswith("__init__.py")}
    wanted = {name for name in listed.stdout.splitlines() if name.split("/")[0] in packages and (ROOT / name).exists()}

    assert wanted - names == set()
    assert {"engine/cpu/csrc/step.cpp", "engine/quality.txt"} <= names
