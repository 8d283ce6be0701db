"""The examples of docs/clients.md run as they stand, but for ports and the model's name."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.running_cluster import running_cluster

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clients.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LIMIT_S = 60
PEERS = Path("~/.cache/baton/peers/grpcurl").expanduser()
"""Where tools/grpcurl.sh puts it."""


def command_of(kind: str, code: str) -> list[str]:
    return [sys.executable, "-c", code] if kind == "python" else ["bash", "-euo", "pipefail", "-c", code]


def test_every_example_is_of_a_kind_that_runs() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "sh"}
    for word in ("Client(", "AsyncClient(", "grpcurl", "curl -sf ", "openai.OpenAI(", "triton."):
        assert any(word in code for _, code in BLOCKS)


@pytest.mark.parametrize(("kind", "code"), BLOCKS, ids=[code.split("\n")[0][:40] for _, code in BLOCKS])
def test_an_example_runs(model_dir: Path, kind: str, code: str) -> None:
    program = code.split()[0]
    searched = os.pathsep.join([*os.get_exec_path(), str(PEERS)])
    if kind == "sh" and shutil.which(program, path=searched) is None:
        pytest.skip(f"{program} is not installed here{'; tools/grpcurl.sh installs it' * (program == 'grpcurl')}")
    with running_cluster(model_dir) as cluster:
        code = code.replace("127.0.0.1:50051", cluster.gateway.grpc_address)
        code = code.replace("127.0.0.1:8000", cluster.gateway.http_address).replace("smollm2-135m-instruct", "fake")

        done = subprocess.run(
            command_of(kind, code),
            cwd=ROOT,
            env={**os.environ, "PATH": searched},  # noqa: TID251  # the examples are programs of their own
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if program == "grpcurl":
        for word in ("baton.v1.Inference\n", "FINISH_REASON_LENGTH", '"status": "SERVING"'):
            assert word in done.stdout
