"""Half precision on the CPU: close to fp32, and KV as the weights are unless asked for otherwise."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from common.config import EngineConfig
from engine.kv_cache import KVCache
from engine.reference import ReferenceBackend
from tests.engine.cuda.batches import POOL_BLOCKS, decode_batch, layout_of


@pytest.mark.parametrize(("weights", "kv_dtype", "kl"), [("fp16", "float16", 1e-4), ("bf16", "bfloat16", 1e-2)])
def test_half_precision_is_close_to_fp32(
    tiny_model: Callable[[str], Path], weights: str, kv_dtype: str, kl: float
) -> None:
    scores = []
    for name in ("fp32", weights):
        backend = ReferenceBackend.load(tiny_model("llama"), EngineConfig.model_validate({"weights": name}))
        kv = KVCache(layout_of(backend, backend.facts.kv_dtypes[0]), POOL_BLOCKS)
        kv.tensor()[:] = 0.5
        backend.attach(kv)
        scores.append(backend.forward(decode_batch([0, 5, 17], Random(1))).logits.log_softmax(-1))
        assert backend.facts.weights == name
        backend.close()
        kv.close()

    exact, got = scores
    assert backend.facts.kv_dtypes[0] == kv_dtype
    assert 0 < float((exact.exp() * (exact - got)).sum(-1).mean()) < kl
