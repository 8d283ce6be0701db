"""What a test that is marked `gpu` needs, and the reason why it is skipped elsewhere."""

import pytest
import torch


def require_gpu() -> None:
    """Skip the running test where there is no GPU, or no CuPy to move its memory."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    pytest.importorskip("cupy", reason="needs CuPy: extra `gpu`")
