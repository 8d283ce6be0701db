"""Without a compiler a worker still serves, on the reference backend, and says so."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cpu.build import supported_isas

ROOT = Path(__file__).parents[3]
CODE = """
import sys
from pathlib import Path
from common.config import EngineConfig
from common.errors import ConfigError
from common.logs import set_up
from engine.engine import Engine
set_up("test", "WARNING")
folder = Path(sys.argv[1])
try:
    Engine.load(folder, EngineConfig(backend="cpu", pool_mib=4), "tiny")
except ConfigError as error:
    print(error.message)
print(Engine.load(folder, EngineConfig(pool_mib=4), "tiny").backend)
"""


@pytest.mark.skipif(not supported_isas(), reason="needs AVX2")
def test_without_a_compiler_auto_takes_the_reference_backend_and_warns(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}  # no program, and an empty cache
    command = [sys.executable, "-c", CODE, str(tiny_model("llama"))]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    refusal, backend = done.stdout.splitlines()
    assert "no C++ compiler found" in refusal
    assert backend == "reference"
    assert "a faster backend was refused" in done.stderr
    assert "no C++ compiler found" in done.stderr
