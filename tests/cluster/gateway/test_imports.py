"""Gateway and router start where no GPU stack is."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["cluster.gateway.server", "cluster.router.server", "cluster.fake_worker", "common.text"]
)
def test_the_control_plane_imports_no_gpu_stack_and_no_ray(module: str) -> None:
    heavy = ("torch", "transformers", "ray", "engine", "prefill", "decode", "kvtransfer", "numpy")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
