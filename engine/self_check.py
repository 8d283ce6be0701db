"""Does an architecture that nobody here has tried compute with paged attention what it computes with its own?

It is asked at load: two short sequences go through the pool in chunks and single tokens, and once more, whole, through
the model's own attention. Whatever paging does not reproduce (a state besides K and V, keys and values of different
sizes, layers that share KV, biases of scores, sinks, another cap) shows as other logits, and the model is refused.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from engine.backend import Backend
from engine.batch import make_batch
from engine.kv_cache import KVCache
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import LayerWatch, ScheduledChunk
from kvtransfer.layout import BlockLayout

STEPS = ((7, 5), (4, 6), (1, 1))
"""Tokens of each of the two sequences in each step; the last ones are generated ones."""
WINDOW_TOKENS = 5
"""What sliding windows are cut to meanwhile, so that so few tokens reach beyond them."""
ERROR_MAX = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 8e-2}
"""Largest difference of a logit over their standard deviation, by the weights' format."""
_BLOCK_TOKENS = 4
_KNOWN_WINDOWS = {
    "sliding_window",
    "use_sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "max_window_layers",
}


def require_own_logits(path: Path, model: Any, make_backend: Callable[[], Backend]) -> None:
    """Compare a model's logits over paged attention with those over its own.

    Args:
        path: of the model, for messages.
        model: a transformers PreTrainedModel on the CPU that was loaded with our attention.
        make_backend: makes a backend of it, on the CPU, which is used and forgotten.

    Raises:
        ConfigError: they differ, or it cannot compute in this way at all.
    """
    family = model.config.model_type
    if odd := [name for name in _windows(model.config) if name not in _KNOWN_WINDOWS]:
        raise ConfigError(f"model {path}: {family} limits what tokens see by {', '.join(odd)}, which is not known here")
    try:
        with _short_windows(model), torch.inference_mode():
            backend = make_backend()
            error = _error(model, backend)
    except Exception as cause:  # foreign code with arguments that it was not written for: any failure is an answer
        words = " ".join(str(cause).split())[:300]
        raise ConfigError(f"model {path}: {family} cannot compute with paged attention: {words}") from cause
    if not error <= ERROR_MAX[backend.facts.weights]:
        raise ConfigError(
            f"model {path}: with paged attention {family} computes something else than with its own "
            f"(logits differ by {error:.2g} of their deviation)"
        )


def _error(model: Any, backend: Backend) -> float:
    """Return the largest difference of a logit over the logits' standard deviation."""
    facts = backend.facts
    random = torch.Generator().manual_seed(1)
    lengths = [sum(sizes) for sizes in zip(*STEPS, strict=True)]
    texts = [torch.randint(facts.vocab_tokens, (length,), generator=random) for length in lengths]
    paged = _paged_logits(backend, [text.tolist() for text in texts])
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        own = [model(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
    finally:
        model.set_attn_implementation(ours)
    return max(float((a - b).abs().max() / b.std()) for a, b in zip(paged, own, strict=True))


def _paged_logits(backend: Backend, texts: list[list[int]]) -> list[torch.Tensor]:
    """Return [T, V] logits of each text."""
    facts = backend.facts
    dtype = facts.kv_dtypes[0]
    layout = BlockLayout("check", dtype, _BLOCK_TOKENS, facts.num_layers, facts.num_kv_heads, facts.head_dim)
    sequences, num_blocks = [], 0
    for text in texts:
        sequence = Sequence.start("check", text, len(text) - 1, SamplingParams(), _BLOCK_TOKENS)
        count = -(-len(text) // _BLOCK_TOKENS)
        sequence.block_table = list(range(num_blocks, num_blocks + count))[::-1]
        num_blocks += count
        sequences.append(sequence)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    layers = tuple(range(1, facts.num_layers + 1))
    with contextlib.closing(KVCache(layout, num_blocks)) as kv:
        backend.attach(kv)
        for sizes in STEPS:
            seen: list[int] = []
            chunks = [ScheduledChunk(sequence, size) for sequence, size in zip(sequences, sizes, strict=True)]
            batch = make_batch(chunks, _BLOCK_TOKENS).asking_all()
            outcome = backend.forward(batch, LayerWatch(layers, seen.append))
            assert tuple(seen) == layers, f"its {len(layers)} layers used replaceable attention {len(seen)} times"
            for i, (sequence, size) in enumerate(chunks):
                sequence.num_computed += size
                logits[i].append(outcome.logits[sum(sizes[:i]) : sum(sizes[: i + 1])])
    return [torch.cat(parts) for parts in logits]


def _windows(config: Any) -> Iterator[str]:
    """Yield the settings by which a model limits what its tokens see."""
    for name, value in config.to_dict().items():
        if ("window" in name or name == "attention_chunk_size") and value is not None:
            yield name


@contextlib.contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Cut all sliding windows of a model to WINDOW_TOKENS."""
    holders = [each for each in (model.config, *model.modules()) if getattr(each, "sliding_window", None)]
    before = [holder.sliding_window for holder in holders]
    for holder in holders:
        holder.sliding_window = WINDOW_TOKENS
    try:
        yield
    finally:
        for holder, window in zip(holders, before, strict=True):
            holder.sliding_window = window
