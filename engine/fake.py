"""An engine without a model: tokens follow from the KV bytes in the pool, so wrong bytes give wrong tokens.

For tests and storms of the loops around the engine. No torch.
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.engine import Engine
from engine.grammar import Grammars, masks_of
from engine.kv_cache import KVCache
from engine.sequence import Sequence
from engine.step import LayerWatch, Limits, ScheduledChunk, TokenOutput
from kvtransfer.layout import BlockLayout

NUM_LAYERS = 2
_MASK = (1 << 63) - 1


def fake_layout(block_tokens: int = 4, model_id: str = "fake") -> BlockLayout:
    """Return the layout of a fake model: two layers of one head with four numbers of four bytes."""
    return BlockLayout(model_id, "float32", block_tokens, NUM_LAYERS, 1, 4)


def fake_continuation(
    token_ids: Seq[int],
    count: int,
    vocab_tokens: int = 1000,
    num_prompt_tokens: int | None = None,
    seed: int | None = None,
) -> list[int]:
    """Return the `count` tokens that a FakeEngine generates after `token_ids`.

    Args:
        token_ids: prompt, and output so far.
        count: how many.
        vocab_tokens: the engine's.
        num_prompt_tokens: how many of token_ids are the prompt; None: all.
        seed: of a request that is not greedy; None: greedy.
    """
    first_output = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    state, tokens = 0, list(token_ids)
    for token_id in tokens:
        state = _mix(state, token_id)
    for position in range(len(tokens), len(tokens) + count):
        tokens.append(_choose(state, seed, position - first_output, vocab_tokens))
        state = _mix(state, tokens[-1])
    return tokens[len(token_ids) :]


class FakeEngine(Engine):
    """An Engine whose step computes a hash over the tokens, kept in the KV bytes like a recurrent state.

    Each slot holds, in every layer: K = (token id + 1, position, 0, 0), V = the state after that token. A step
    compares the K of all earlier tokens with the sequence and continues from the V that it finds. What does not agree
    is counted in `kv_faults` (readable from any thread) and, since the state is wrong, so are the tokens.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_tokens: int = 4,
        vocab_tokens: int = 1000,
        context_tokens: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
        step_s: float = 0.0,
        on_step: Callable[[Seq[ScheduledChunk]], None] | None = None,
        model_id: str = "fake",
        grammars: Grammars | None = None,
    ) -> None:
        """Make the pool.

        Args:
            num_blocks: blocks in the pool.
            block_tokens: tokens in a block.
            vocab_tokens: tokens are drawn from [0, vocab_tokens).
            context_tokens: window.
            eos_token_ids: end a sequence when drawn.
            step_s: seconds that each step pretends to compute.
            on_step: called on the compute thread when a step begins; may block or raise.
            model_id: in the layout.
            grammars: of a tokenizer with `vocab_tokens` tokens, to obey constraints.
        """
        kv = KVCache(fake_layout(block_tokens, model_id), num_blocks)
        runner = _FakeRunner(kv, vocab_tokens, step_s, on_step)
        super().__init__(runner, kv, Limits(context_tokens, vocab_tokens, eos_token_ids), grammars)
        self._fake = runner

    @property
    def kv_faults(self) -> list[str]:
        """What was wrong in the KV that steps read, in words."""
        return list(self._fake.faults)

    @property
    def num_steps(self) -> int:
        """Steps run so far."""
        return self._fake.num_steps

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed so far, all steps together; a prefix hit computes fewer."""
        return self._fake.num_tokens


class _Rows(NamedTuple):
    """What a step writes for one chunk of T tokens."""

    blocks: NDArray[np.int64]  # [T]
    offsets: NDArray[np.int64]  # [T]
    numbers: NDArray[np.int64]  # [T, K or V, 2]
    state: int
    """After the last token."""


class _FakeRunner:
    """Reads and writes the fake KV. `faults` only grows, so other threads may read it."""

    backend = "fake"

    def __init__(
        self, kv: KVCache, vocab_tokens: int, step_s: float, on_step: Callable[[Seq[ScheduledChunk]], None] | None
    ) -> None:
        layout = kv.layout
        self.faults: list[str] = []
        self.num_steps = 0
        self.num_tokens = 0
        self._block_tokens = layout.block_tokens
        self._vocab_tokens = vocab_tokens
        self._step_s = step_s
        self._on_step = on_step
        self._running = threading.Lock()
        # [block, layer, K or V, token, 2] i64: the 16 bytes of a slot are two numbers.
        pool = np.frombuffer(kv.buffer, dtype=np.int64)
        self._pool: NDArray[np.int64] | None = pool.reshape(kv.num_blocks, NUM_LAYERS, 2, layout.block_tokens, 2)

    def run(self, batch: Seq[ScheduledChunk], watch: LayerWatch | None) -> list[TokenOutput | None]:
        # Two steps at once are a caller's bug that a real model would answer with garbage.
        assert self._running.acquire(blocking=False), "a step runs already"
        try:
            if self._on_step is not None:
                self._on_step(batch)
            if self._step_s:
                time.sleep(self._step_s)
            self.num_steps += 1
            computed = [self._compute(chunk) for chunk in batch]
            for layer in range(NUM_LAYERS):
                for rows in computed:
                    self._write(layer, rows)
                if watch is not None and layer + 1 in watch.marks:
                    watch.reached(layer + 1)
            return [self._sample(chunk, rows) for chunk, rows in zip(batch, computed, strict=True)]
        finally:
            self._running.release()

    def close(self) -> None:
        self._pool = None

    def _compute(self, chunk: ScheduledChunk) -> "_Rows":
        assert self._pool is not None, "the engine is closed"
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        state = self._state_before(sequence, self._pool) if start else 0
        numbers = np.empty((chunk.num_tokens, 2, 2), dtype=np.int64)
        positions = np.arange(start, start + chunk.num_tokens)
        for row, position in enumerate(positions.tolist()):
            token_id = sequence.token_ids[position]
            state = _mix(state, token_id)
            numbers[row] = (token_id + 1, position), (state, ~state)
        self.num_tokens += chunk.num_tokens
        blocks = np.asarray(sequence.block_table)[positions // self._block_tokens]
        return _Rows(blocks, positions % self._block_tokens, numbers, state)

    def _write(self, layer: int, rows: "_Rows") -> None:
        assert self._pool is not None
        self._pool[rows.blocks, layer, :, rows.offsets] = rows.numbers

    def _state_before(self, sequence: Sequence, pool: NDArray[np.int64]) -> int:
        """Check the KV of all computed tokens and return the state that the last one holds."""
        count = sequence.num_computed
        positions = np.arange(count)
        blocks = np.asarray(sequence.block_table)[positions // self._block_tokens]
        slots = pool[blocks, :, :, positions % self._block_tokens]  # [count, layer, K or V, 2]
        want = np.stack([np.asarray(sequence.token_ids[:count]) + 1, positions], axis=-1)
        wrong = np.flatnonzero((slots[:, :, 0] != want[:, None]).any(axis=(1, 2)))
        states = slots[:, :, 1]
        torn = np.flatnonzero(
            (states[:, :, 0] != ~states[:, :, 1]).any(axis=1) | (states[:, 0] != states[:, 1]).any(axis=1)
        )
        if len(wrong) or len(torn):
            first = min([*wrong[:1], *torn[:1]])
            self.faults.append(
                f"{sequence.request_id}: KV of {len(wrong)} tokens is foreign and of {len(torn)} torn, of {count}; "
                f"first at position {first}, block {blocks[first]}"
            )
            # Layers add up, so that damage in any of them shows in the tokens.
            return int(slots.sum(dtype=np.int64)) & _MASK
        return int(states[-1, 0, 0])

    def _sample(self, chunk: ScheduledChunk, rows: "_Rows") -> TokenOutput | None:
        if not chunk.reaches_end:
            return None
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        seed = None if sampling.is_greedy else sampling.seed
        token_id = _choose(rows.state, seed, sequence.num_output_tokens, self._vocab_tokens)
        masks = masks_of([sequence], self._vocab_tokens)
        if masks.failed:
            return TokenOutput(0, None, [], masks.failed[0])
        if masks.rows:  # the nearest allowed token, counting up and around
            allowed = np.flatnonzero(~masks.excluded[0])
            token_id = int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])
        if sampling.logprobs is None:
            return TokenOutput(token_id, None, [])
        top = [((token_id + i) % self._vocab_tokens, -0.5 - i) for i in range(sampling.logprobs)]
        return TokenOutput(token_id, -0.5, top)


def _mix(state: int, token_id: int) -> int:
    """Continue the hash by one token. 63 bits: a slot's numbers are signed."""
    state = ((state ^ (token_id + 0x9E3779B97F4A7C1)) * 0xBF58476D1CE4E5B9) & _MASK
    return state ^ (state >> 29)


def _choose(state: int, seed: int | None, output_position: int, vocab_tokens: int) -> int:
    drawn = state if seed is None else _mix(_mix(state, seed & _MASK), output_position)
    return (drawn >> 8) % vocab_tokens
