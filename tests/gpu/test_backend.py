"""On a GPU: decode graphs give what the same step gives without one, and layers are final when a step says so.

That the tokens are Hugging Face's is in tests/engine/test_engine.py, which runs over this backend too.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from common.config import EngineConfig
from engine.attention.paged import PagedPool
from engine.backend import load_backend
from engine.cuda.backend import CudaBackend, row_logits
from engine.cuda.decode import DecodeStep, DecodeSteps
from engine.cuda.pool import DevicePool, free_device_bytes
from engine.loading import load_parts
from engine.reference import ATTENTION_NAME
from engine.weights import load_model
from tests.engine.cuda.batches import POOL_BLOCKS, decode_batch, layout_of
from tests.gpu.needs import require_gpu

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


@pytest.fixture(autouse=True)
def _gpu() -> None:
    require_gpu()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_graph_gives_what_the_step_gives_without_one(tiny_model: Callable[[str], Path], family: str) -> None:
    backend = CudaBackend.load(tiny_model(family), EngineConfig(weights="fp32"))
    kv = DevicePool(layout_of(backend), POOL_BLOCKS, GPU)
    kv.tensor().normal_()
    pool = PagedPool(kv)
    model: Any = load_model(tiny_model(family), ATTENTION_NAME).to(GPU)
    rng = Random(3)
    with torch.inference_mode():
        graphs = DecodeSteps(pool, partial(row_logits, model), is_graph=True)
        for lengths in ([3, 17, 30], [5], [0, 44, 2], [1, 2, 3, 4], [30, 30]):  # some shapes come twice
            batch = decode_batch(lengths, rng)
            plain = DecodeStep(4, 16, pool, partial(row_logits, model), graphs=None)
            before = kv.raw().clone()

            expected = plain.run(batch)[: len(lengths)].clone()
            after = kv.raw().clone()
            kv.raw().copy_(before)
            got = graphs.run(batch)

            assert torch.allclose(got, expected, atol=1e-3, rtol=1e-3)
            assert torch.allclose(
                kv.raw().view(torch.float32), after.view(torch.float32), atol=1e-4, rtol=1e-4, equal_nan=True
            )
    backend.close()
    kv.close()


def test_auto_takes_the_gpu_with_half_precision(tiny_model: Callable[[str], Path]) -> None:
    name, backend, _ = load_backend(tiny_model("llama"), EngineConfig())

    assert name == "cuda"
    assert backend.facts.weights in ("bf16", "fp16")
    assert backend.facts.device == GPU
    backend.close()


def test_a_pool_without_a_size_takes_its_share_of_the_gpu(tiny_model: Callable[[str], Path]) -> None:
    free = free_device_bytes(GPU)

    parts = load_parts(tiny_model("llama"), EngineConfig(backend="cuda", pool_share=0.5), "tiny")

    assert 0 < parts.kv.num_blocks * parts.kv.layout.block_bytes <= 0.5 * free
    assert parts.kv.device is not None
    parts.backend.close()
    parts.kv.close()
