"""Without a compiler or the instructions that the kernels need, a worker still serves, slowly, and says so."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import engine.cpu.backend
from common.config import EngineConfig
from common.errors import ConfigError
from engine.cpu.build import supported_isas
from engine.engine import Engine

ROOT = Path(__file__).parents[3]
CODE = """
import asyncio
import sys
from pathlib import Path
from common.config import DecodeConfig, EngineConfig, TransferConfig
from common.errors import ConfigError
from common.logs import set_up
from decode.worker import DecodeWorker
from engine.engine import Engine
set_up("test", "WARNING")
folder = Path(sys.argv[1])
try:
    Engine.load(folder, EngineConfig(backend="cpu", pool_mib=4), "tiny")
except ConfigError as error:
    print(error.message)

async def main():
    engine = EngineConfig(pool_mib=4)
    worker = await DecodeWorker.start(
        "d0", "127.0.0.1", folder, "tiny", engine, DecodeConfig(), TransferConfig(transport="shm"), 3.0,
        is_colocated=True,
    )
    handshake = worker.service.handshake()
    print(handshake.backend)
    print(*handshake.slow_paths, sep="\\n")
    await worker.stop(0.0)

asyncio.run(main())
"""


@pytest.mark.skipif(not supported_isas(), reason="needs AVX2")
def test_without_a_compiler_a_worker_computes_by_the_reference_backend_warns_and_tells_the_cluster(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}  # no program, and an empty cache
    command = [sys.executable, "-c", CODE, str(tiny_model("llama"))]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    refusal, backend, computing, copying = done.stdout.splitlines()
    assert "no C++ compiler found" in refusal
    assert backend == "reference"
    assert computing.startswith("backend reference computes: backend cpu: no C++ compiler found")
    assert copying.startswith("blocks are copied by memmove, run by run: no C++ compiler found")
    assert "a faster backend was refused" in done.stderr
    assert "SLOW PATH: blocks are copied by memmove" in done.stderr


def test_without_avx2_the_fused_backend_is_refused_and_auto_says_what_computes_instead(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.cpu.backend, "supported_isas", list)  # what it answers on such a machine
    folder = tiny_model("llama")

    with pytest.raises(ConfigError, match="this machine has no AVX2"):
        Engine.load(folder, EngineConfig(backend="cpu", pool_mib=4), "tiny")
    with caplog.at_level(logging.WARNING):
        loaded = Engine.load(folder, EngineConfig(pool_mib=4), "tiny")

    assert loaded.backend == "reference"
    assert loaded.slow_paths == ("backend reference computes: backend cpu: this machine has no AVX2",)
    assert "a faster backend was refused" in caplog.text
    loaded.close()
