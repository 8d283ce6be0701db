"""What a lossy codec does to the model that is served: measured on the model itself, before the codec may be used.

A context of ordinary prose is prefilled once. Its blocks are copied through the codec, and the same continuation is
computed behind the exact and behind the copied context: the two distributions of each next token are compared.
"""

import logging
import time
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import ConfigError
from common.logs import log
from engine.backend import Backend
from engine.batch import make_batch
from engine.codec_bound import CodecBound
from engine.kv_cache import KVMemory
from engine.quality import load_text
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk
from kvtransfer.codecs.base import Slabs
from kvtransfer.codecs.registry import CODECS
from kvtransfer.memory import block_bytes_of

logger = logging.getLogger(__name__)

CONTEXT_TOKENS = 256
SCORED_TOKENS = 64
PROSE_TOKENS = 2048


class CodecQuality(NamedTuple):
    """What one codec changes; KL divergences of next-token distributions, from exact to coded, in nats."""

    codec: str
    kl_mean: float
    kl_max: float
    top_agreement: float
    """Share of next tokens whose likeliest candidate is the same."""
    greedy_agreement: float | None
    """Share of `SCORED_TOKENS` greedy tokens before the first that differs; None: not measured."""
    num_tokens: int


class Copied(NamedTuple):
    """One block's way through a codec."""

    raw_bytes: int
    encoded_bytes: int
    encode_s: float
    decode_s: float


class Scorer:
    """A backend and a pool that nobody else uses, as long as it measures."""

    def __init__(self, backend: Backend, kv: KVMemory, window_tokens: int) -> None:
        self._backend = backend
        self._kv = kv
        self._window_tokens = window_tokens
        self.copied: list[Copied] = []
        """Every block that went through a codec."""

    def context_tokens_for(self, num_tokens: int) -> int:
        """Return how long contexts may be: whole blocks, at most `CONTEXT_TOKENS`.

        Raises:
            ConfigError: not even a block.
        """
        block_tokens = self._kv.layout.block_tokens
        room = min(self._window_tokens - 1, num_tokens, self._kv.num_blocks // 2 * block_tokens)
        size = min(CONTEXT_TOKENS, room - SCORED_TOKENS) // block_tokens * block_tokens
        if size < block_tokens:
            raise ConfigError(f"no room to measure a codec: {room} tokens, {SCORED_TOKENS} and a block are needed")
        return size

    @torch.inference_mode()
    def prefill(self, tokens: list[int], size: int, codec: str | None = None) -> Sequence:
        """Return a sequence whose first `size` tokens have KV: computed, or a copy of that through a codec.

        The computed one lies in the pool's first half. A copy is made of what is there.
        """
        sequence = Sequence.start("quality", tokens, len(tokens), SamplingParams(), self._kv.layout.block_tokens)
        first = 0 if codec is None else self._kv.num_blocks // 2
        num_blocks = -(-len(tokens) // self._kv.layout.block_tokens)
        sequence.block_table = list(range(first, first + num_blocks))
        if codec is None:
            self._forward(sequence, size)
        else:
            self._copy(codec, first, size // self._kv.layout.block_tokens)
            sequence.num_computed = size
        return sequence

    @torch.inference_mode()
    def score(self, sequence: Sequence, num_tokens: int) -> torch.Tensor:
        """Return [num_tokens, vocab] fp32 logits after each of the next tokens; the sequence stays where it is."""
        before = sequence.num_computed
        logits = self._forward(sequence, num_tokens)
        sequence.num_computed = before
        return logits

    @torch.inference_mode()
    def continue_greedily(self, sequence: Sequence, size: int) -> list[int]:
        """Return the likeliest tokens behind the first `size` tokens and one more."""
        sequence.num_computed = size
        sequence.token_ids = sequence.token_ids[: size + 1]
        for _ in range(SCORED_TOKENS):
            sequence.token_ids.append(int(self._forward(sequence, 1)[-1].argmax()))
        return sequence.token_ids[size + 1 :]

    def _forward(self, sequence: Sequence, num_tokens: int) -> torch.Tensor:
        batch = make_batch([ScheduledChunk(sequence, num_tokens)], self._kv.layout.block_tokens)
        logits = self._backend.forward(batch.asking_all()).logits
        sequence.num_computed += num_tokens
        return logits

    def _copy(self, name: str, first: int, num_blocks: int) -> None:
        layout, codec = self._kv.layout, CODECS[name]
        slabs = Slabs.of(layout, 1, layout.num_layers)
        for block in range(num_blocks):
            with block_bytes_of(self._kv, block) as source:
                started = time.monotonic()
                encoded = codec.encode(source, slabs)
                between = time.monotonic()
            with block_bytes_of(self._kv, first + block, is_written=True) as target:
                begun = time.monotonic()
                codec.decode(encoded, slabs, target)
                ended = time.monotonic()
            self.copied.append(Copied(slabs.num_bytes, encoded.nbytes, between - started, ended - begun))


def require_fidelity(model: Scorer, bound: CodecBound, token_ids: list[int]) -> None:
    """Measure what is lossy of the codecs in use.

    Raises:
        ConfigError: one changes more than the bound, or the pool has no room to measure it.
    """
    for name in sorted(bound.codecs):
        quality = measure(model, name, token_ids, num_contexts=1, is_greedy_wanted=False)
        log(logger, logging.INFO, "codec measured", codec=name, kl_mean=quality.kl_mean, tokens=quality.num_tokens)
        if not quality.kl_mean <= bound.kl_max:
            raise ConfigError(
                f"codec {name} changes this model's next-token distribution by a mean KL divergence of "
                f"{quality.kl_mean:.2g} nats, more than transfer.codec_kl_max={bound.kl_max:g}: use another codec, or "
                f"raise the bound"
            )


def measure(model: Scorer, codec: str, token_ids: list[int], num_contexts: int, is_greedy_wanted: bool) -> CodecQuality:
    """Compare exact and coded contexts.

    Args:
        model: with a pool that nobody uses.
        codec: name.
        token_ids: prose in the model's tokens; contexts begin at different places of it.
        num_contexts: how many.
        is_greedy_wanted: whether to generate behind both as well, which takes longer.

    Raises:
        ConfigError: no room for two contexts in the pool or in the window.
    """
    size = model.context_tokens_for(len(token_ids))
    stride = max(1, (len(token_ids) - size - SCORED_TOKENS) // max(1, num_contexts - 1))
    divergences, agreements, greedy = [], [], []
    for number in range(num_contexts):
        tokens = token_ids[number * stride :][: size + SCORED_TOKENS]
        exact, coded = model.prefill(tokens, size), model.prefill(tokens, size, codec)
        ours, theirs = (torch.log_softmax(model.score(one, SCORED_TOKENS), -1) for one in (exact, coded))
        divergences.append((ours.exp() * (ours - theirs)).sum(-1).clamp(min=0))
        agreements.append((ours.argmax(-1) == theirs.argmax(-1)).float())
        if is_greedy_wanted:
            both = zip(model.continue_greedily(exact, size), model.continue_greedily(coded, size), strict=True)
            equal = [a == b for a, b in both]
            greedy.append((equal.index(False) if False in equal else len(equal)) / len(equal))
    kl = torch.cat(divergences)
    top = float(torch.cat(agreements).mean())
    mean_greedy = sum(greedy) / len(greedy) if greedy else None
    return CodecQuality(codec, float(kl.mean()), float(kl.max()), top, mean_greedy, kl.numel())


def prose(model_dir: Path, vocab_tokens: int) -> list[int]:
    """Return prose in a model's tokens; where it has no tokenizer, numbers that follow no rule."""
    try:
        ids = load_text(model_dir)
    except ConfigError:
        ids = torch.randint(vocab_tokens, (CONTEXT_TOKENS * 2,), generator=torch.Generator().manual_seed(1)).tolist()
    return [token_id for token_id in ids[:PROSE_TOKENS] if token_id < vocab_tokens]
