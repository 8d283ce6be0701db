"""Decode steps on random blocks, for backend `cuda` wherever it computes."""

from random import Random
from typing import Any

import torch

from engine.batch import Batch, Segment
from kvtransfer.layout import BlockLayout

BLOCK_TOKENS = 4
POOL_BLOCKS = 64


def layout_of(backend: Any, dtype: str = "float32") -> BlockLayout:
    facts = backend.facts
    return BlockLayout("tiny", dtype, BLOCK_TOKENS, facts.num_layers, facts.num_kv_heads, facts.head_dim)


def decode_batch(lengths: list[int], rng: Random) -> Batch:
    """Return a step in which each sequence of `lengths` computed tokens gets one more, on blocks in random order."""
    order = rng.sample(range(POOL_BLOCKS), POOL_BLOCKS)
    tables = [[order.pop() for _ in range(-(-(length + 1) // BLOCK_TOKENS))] for length in lengths]
    width = max(map(len, tables))
    positions = torch.tensor(lengths)
    padded = torch.tensor([table + table[:1] * (width - len(table)) for table in tables], dtype=torch.int32)
    blocks = padded.long().gather(1, positions[:, None] // BLOCK_TOKENS)[:, 0]
    return Batch(
        torch.tensor([rng.randrange(4, 200) for _ in lengths]),
        positions,
        blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        tuple(Segment(row, 1, length, is_decode=True) for row, length in enumerate(lengths)),
        padded,
        torch.arange(len(lengths)),
        torch.arange(0),
    )
