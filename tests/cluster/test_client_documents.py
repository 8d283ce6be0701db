"""The examples of the documents run as they stand, but for ports, names of models and files, and shorter loads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.cluster.running_cluster import running_cluster

ROOT = Path(__file__).parents[2]
GRPCURL = Path("~/.cache/baton/peers/grpcurl").expanduser()
"""Where tools/grpcurl.sh puts it."""
LIMIT_S = 600
TRACE = '{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}\n' * 2


class Example(NamedTuple):
    page: str
    kind: str
    code: str

    @property
    def title(self) -> str:
        return f"{self.page}: {self.code.splitlines()[0][:40]}"


EXAMPLES = [
    Example(page, kind, code)
    for page in ("README.md", "docs/clients.md", "docs/security.md", "loadtest/README.md")
    for kind, code in re.findall(r"^```(python|sh)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
]
REPLACED = {
    "smollm2-135m-instruct": "fake",
    "1f2e3d4c5b6a": "$(baton key list | head -n 1 | cut -f 1)",
    "A.json B.json": "run.json run.json",
    "poisson:rate=2 -n 50": "closed:users=2 -n 3",
    "--duration 30 --slo-ttft 2 --slo-tpot 0.2": "--duration 0.5 --slo-ttft 0.00001",
    "loadtest capacity": "loadtest capacity --duration 0.5",
}
SAID = {
    "grpcurl": ("baton.v1.Inference\n", "FINISH_REASON_LENGTH", '"status": "SERVING"'),
    "curl": ('"usage"',),
    "baton key": ("requests_per_s=10", "\tops\tadmin\t"),
    "baton loadtest": ("TTFT ms p99", "goodput", "requests/s", "hit"),
}
"""What is seen of an example, by how it begins."""


def run(example: Example, folder: Path, grpc_address: str, http_address: str) -> str:
    """Run an example at home in a folder of its own, and return what it wrote."""
    code = example.code.replace("127.0.0.1:50051", grpc_address).replace("127.0.0.1:8000", http_address)
    for old, new in REPLACED.items():
        code = code.replace(old, new)
    (folder / "trace.jsonl").write_text(TRACE)
    searched = os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path(), str(GRPCURL)])
    program = example.code.split()[0]
    if example.kind == "sh" and shutil.which(program, path=searched) is None:
        pytest.skip(f"{program} is not installed here{'; tools/grpcurl.sh installs it' * (program == 'grpcurl')}")
    done = subprocess.run(
        [sys.executable, "-c", code] if example.kind == "python" else ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": searched, "HOME": str(folder), "PYTHONPATH": str(ROOT)},  # noqa: TID251  # programs of their own
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_every_page_has_the_examples_that_people_look_for() -> None:
    codes = [example.code for example in EXAMPLES]

    for word in ("Client(", "AsyncClient(", "grpcurl", "curl -sf ", "openai.OpenAI(", "triton."):
        assert any(word in code for code in codes)
    assert {example.page for example in EXAMPLES if example.kind == "sh"} == {example.page for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_an_example_runs(model_dir: Path, tmp_path: Path, example: Example) -> None:
    with running_cluster(model_dir) as cluster:
        said = run(example, tmp_path, cluster.gateway.grpc_address, cluster.gateway.http_address)

    assert said.strip()
    for beginning, words in SAID.items():
        if example.code.startswith(beginning):
            assert all(word in said for word in words), said


def test_the_keys_of_the_example_are_those_that_a_gateway_asks_for(model_dir: Path, tmp_path: Path) -> None:
    (example,) = [example for example in EXAMPLES if example.code.startswith("baton key")]
    revoked, kept = run(example, tmp_path, "", "").splitlines()[:2]

    with running_cluster(model_dir, keys_file=tmp_path / ".config/baton/keys.yaml", admin_key=kept) as cluster:
        url = f"http://{cluster.gateway.http_address}/v1/models"
        answers = [httpx.get(url, headers={"authorization": f"Bearer {key}"}) for key in (kept, revoked)]

    assert [answer.status_code for answer in answers] == [200, 401]
