"""Paged attention equals dense attention, whatever the block tables, chunks, head shapes, windows and soft caps."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.paged import AttentionPlan, PagedPool, paged_attention
from engine.batch import make_batch
from engine.kv_cache import KVCache
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk
from kvtransfer.layout import BlockLayout

NUM_BLOCKS, NUM_LAYERS, LAYER = 60, 2, 1


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int, softcap: float
) -> torch.Tensor:
    """Attend with the last rows of [n, heads, D] keys; 0: no window, no soft cap."""
    heads, num_rows, n = query.shape[1], len(query), len(key)
    keys, values = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in (key, value))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    row, place = torch.arange(n - num_rows, n)[:, None], torch.arange(n)
    seen = (place <= row) & ((place > row - window) if window else True)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=4),
    block_tokens=st.sampled_from([1, 4, 5, 16]),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 20]),
    window=st.sampled_from([0, 1, 7, 30]),
    softcap=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 1 << 16),
)
def test_any_block_table_gives_what_dense_attention_gives(
    chunks: list[tuple[int, int]],
    block_tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int,
    softcap: float,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    kv = KVCache(BlockLayout("tiny", "float32", block_tokens, NUM_LAYERS, kv_heads, head_dim), NUM_BLOCKS * 5)
    kv.tensor().fill_(torch.nan)  # what nobody wrote must not be looked at
    pool, free = PagedPool(kv), torch.randperm(NUM_BLOCKS * 5, generator=rng).tolist()
    scheduled, contents = [], []
    for context, num_tokens in chunks:
        total = context + num_tokens
        sequence = Sequence.start("s", list(range(total)), total, SamplingParams(), block_tokens)
        sequence.block_table = [free.pop() for _ in range(-(-total // block_tokens))]
        sequence.num_computed = context
        content = torch.randn(2, total, kv_heads, head_dim, generator=rng)
        place = torch.arange(context)
        slots = torch.tensor(sequence.block_table)[place // block_tokens] * block_tokens + place % block_tokens
        pool.write(LAYER, pool.row_of(slots), content[0, :context], content[1, :context])
        scheduled.append(ScheduledChunk(sequence, num_tokens))
        contents.append(content)
    key, value = (torch.cat([c[i, chunk[0] :] for c, chunk in zip(contents, chunks, strict=True)]) for i in (0, 1))
    query = torch.randn(len(key), kv_heads * group, head_dim, generator=rng)

    plan = AttentionPlan.of(make_batch(scheduled, block_tokens), pool)
    got = paged_attention(plan, LAYER, query, key, value, 0.3, window or None, softcap or None)

    rows = torch.split(query, [num_tokens for _, num_tokens in chunks])
    want = [dense(q, c[0], c[1], 0.3, window, softcap) for q, c in zip(rows, contents, strict=True)]
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-5)
    kv.close()
