"""Config -> a loaded backend, a pool in the layout it wants, and the runner that ties them."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.config import EngineConfig
from common.errors import ConfigError
from common.logs import log
from engine.backend import Backend, BackendFacts, load_backend
from engine.codec_bound import CodecBound
from engine.codec_quality import Scorer, prose, require_fidelity
from engine.free_memory import free_memory_bytes
from engine.grammar import Grammars
from engine.kv_cache import KVCache, KVMemory, blocks_of_free_memory, blocks_within
from engine.model_runner import ModelRunner
from engine.step import Limits
from kvtransfer.layout import BlockLayout

logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """A backend with its pool."""

    name: str
    backend: Backend
    kv: KVMemory
    context_tokens: int
    slow_paths: tuple[str, ...]
    """See `Engine.slow_paths`."""


class Loaded(NamedTuple):
    """The parts of an Engine, in the order of its arguments."""

    runner: ModelRunner
    kv: KVMemory
    limits: Limits
    grammars: Grammars | None
    slow_paths: tuple[str, ...]


def load_parts(model_dir: Path, config: EngineConfig, model_id: str) -> Parts:
    """Load a backend and attach a pool to it; see `Engine.load` for arguments and errors."""
    name, backend, refused = load_backend(model_dir, config)
    try:
        facts = backend.facts
        context_tokens = _context_tokens(facts, config)
        layout = BlockLayout(
            model_id,
            _kv_dtype(name, facts, config),
            config.block_tokens,
            facts.num_layers,
            facts.num_kv_heads,
            facts.head_dim,
        )
        kv = _pool(layout, facts.device, config, context_tokens)
        backend.attach(kv)
    except BaseException:
        backend.close()
        raise
    log(
        logger,
        logging.INFO,
        "model loaded",
        model=model_id,
        backend=name,
        weights=facts.weights,
        kv_dtype=layout.dtype,
        blocks=kv.num_blocks,
        block_bytes=layout.block_bytes,
    )
    slow_paths = (f"backend {name} computes: {refused}",) if refused else ()
    return Parts(name, backend, kv, context_tokens, slow_paths)


def load_runner(model_dir: Path, config: EngineConfig, model_id: str, bound: CodecBound | None) -> Loaded:
    """Load what `Engine.load` puts together; see there for arguments and errors."""
    name, backend, kv, context_tokens, slow_paths = load_parts(model_dir, config, model_id)
    facts = backend.facts
    try:
        # A pool of bytes is never coded again, see codec_for.
        if bound is not None and kv.layout.scale_bytes == 0:
            require_fidelity(Scorer(backend, kv, context_tokens), bound, prose(model_dir, facts.vocab_tokens))
        grammars = Grammars.load(model_dir, facts.vocab_tokens, facts.eos_token_ids)
        runner = ModelRunner(name, backend, kv, config.threads)
    except BaseException:
        backend.close()
        kv.close()
        raise
    return Loaded(runner, kv, Limits(context_tokens, facts.vocab_tokens, facts.eos_token_ids), grammars, slow_paths)


def _pool(layout: BlockLayout, device: str, config: EngineConfig, context_tokens: int) -> KVMemory:
    """Make the pool where the backend computes, in the size that the config asks for."""
    if device == "cpu":
        return KVCache(layout, _pool_blocks(layout, config, context_tokens, free_memory_bytes))
    from engine.cuda.pool import DevicePool, free_device_bytes

    return DevicePool(layout, _pool_blocks(layout, config, context_tokens, partial(free_device_bytes, device)), device)


def _pool_blocks(layout: BlockLayout, config: EngineConfig, context_tokens: int, free_bytes: Callable[[], int]) -> int:
    if config.pool_blocks is not None:
        return config.pool_blocks
    if config.pool_mib is not None:
        return blocks_within(layout, config.pool_mib)
    return blocks_of_free_memory(layout, config.pool_share, context_tokens, free_bytes())


def _context_tokens(facts: BackendFacts, config: EngineConfig) -> int:
    if config.context_tokens is None:
        return facts.context_tokens
    if config.context_tokens > facts.context_tokens:
        raise ConfigError(
            f"engine.context_tokens={config.context_tokens} is more than the model's window of {facts.context_tokens}"
        )
    return config.context_tokens


def _kv_dtype(name: str, facts: BackendFacts, config: EngineConfig) -> str:
    if config.kv_dtype == "auto":
        return facts.kv_dtypes[0]
    if config.kv_dtype not in facts.kv_dtypes:
        raise ConfigError(
            f"engine.kv_dtype={config.kv_dtype} is not available with backend {name}: {', '.join(facts.kv_dtypes)}"
        )
    return config.kv_dtype
