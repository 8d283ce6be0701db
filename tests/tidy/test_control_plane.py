"""The control plane starts without torch and transformers: it must run where no GPU stack is, and at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "accelerate", "kvtransfer"}
DATA_PLANE = {"engine", "prefill", "decode"}


def modules(*folders: str) -> list[str]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name != "__init__.py"]


@pytest.mark.parametrize(
    ("folders", "heavy"),
    [
        pytest.param(("cluster", "common"), HEAVY | DATA_PLANE, id="control plane"),
        pytest.param(("loadtest",), HEAVY, id="loadtest, whose simulator runs schedulers and block pools"),
    ],
)
def test_no_module_of_the_control_plane_imports_the_data_plane(folders: tuple[str, ...], heavy: set[str]) -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {modules(*folders)!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {heavy!r} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["cluster.cli", "cluster.client", "cluster.launcher.reaper", "common.config"])
def test_what_starts_often_does_not_import_ray(module: str) -> None:
    code = f"import sys, {module}\nassert 'ray' not in sys.modules"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.returncode == 0, done.stderr
