"""An engine over backend `cuda` that computes on the CPU: all of it but graphs and what is CUDA's own."""

from pathlib import Path

import torch

from common.config import EngineConfig
from engine.cuda.backend import CudaBackend
from engine.cuda.pool import DevicePool
from engine.engine import Engine
from engine.kv_cache import KVCache, KVMemory
from engine.model_runner import ModelRunner
from engine.step import Limits
from kvtransfer.device import Device
from kvtransfer.fake_device import FakeDevice
from kvtransfer.layout import BlockLayout

CPU = torch.device("cpu")


def fake_device(raw: torch.Tensor) -> Device:
    """Return what transfers use of a pool on the CPU that passes for one in a GPU."""
    return FakeDevice(raw.view(-1).numpy())


def engine_on_cpu(folder: Path, model_id: str, config: EngineConfig, is_in_device: bool = False) -> Engine:
    """Load a model; its pool is in host memory, or passes for one in a GPU."""
    assert config.pool_blocks is not None
    backend = CudaBackend.load(folder, config, CPU)
    facts = backend.facts
    dtype = facts.kv_dtypes[0] if config.kv_dtype == "auto" else config.kv_dtype
    layout = BlockLayout(model_id, dtype, config.block_tokens, facts.num_layers, facts.num_kv_heads, facts.head_dim)
    kv: KVMemory
    if is_in_device:
        kv = DevicePool(layout, config.pool_blocks, "cpu", fake_device)
    else:
        kv = KVCache(layout, config.pool_blocks)
    backend.attach(kv)
    limits = Limits(facts.context_tokens, facts.vocab_tokens, facts.eos_token_ids)
    return Engine(ModelRunner("cuda", backend, kv, config.threads), kv, limits)
