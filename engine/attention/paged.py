"""Paged attention in plain torch: write K and V to their slots, gather each sequence's tokens, SDPA. The reference.

Rows of a chunk (prefill) attend one sequence at a time; single rows (decode) of sequences of like length attend
together, padded to the longest.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Self

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Batch, Segment
from engine.kv_cache import KVMemory


class PagedPool:
    """The pool as rows: row `((block * L + layer) * 2 + k or v) * block_tokens + offset` is one token's `[H * D]`.

    Gathering whole rows costs 1.5 times a plain copy; indexing the six-dimensional view 7 times (2,048 tokens of the
    demo model's 768 bytes, one thread).
    """

    def __init__(self, kv: KVMemory) -> None:
        layout = kv.layout
        self.block_tokens = layout.block_tokens
        self.num_kv_heads, self.head_dim = layout.num_kv_heads, layout.head_dim
        self._layer_rows = 2 * layout.block_tokens
        self._block_rows = layout.num_layers * self._layer_rows
        self.rows = kv.tensor().view(-1, layout.num_kv_heads * layout.head_dim)

    def row_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of layer 0's K of `slots`; any shape, i64."""
        return slots // self.block_tokens * self._block_rows + slots % self.block_tokens

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write `key` and `value`, [T, H, D] of any float type, to layer `layer` of `rows`, [T]."""
        first = rows + layer * self._layer_rows
        self.rows.index_copy_(0, first, key.flatten(1).to(self.rows.dtype))
        self.rows.index_copy_(0, first + self.block_tokens, value.flatten(1).to(self.rows.dtype))

    def read(self, layer: int, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, each [*rows.shape, H, D] of `dtype`, of layer `layer` at `rows`."""
        first = (rows + layer * self._layer_rows).flatten()
        shape = (*rows.shape, self.num_kv_heads, self.head_dim)
        key = self.rows.index_select(0, first).view(shape)
        value = self.rows.index_select(0, first + self.block_tokens).view(shape)
        return key.to(dtype), value.to(dtype)


@dataclass(slots=True)
class Group:
    """Chunks that attend in one call.

    Attributes:
        rows: [b * t] i64, their rows in the batch, t for each chunk.
        keys: [b, n] i64, pool rows of the tokens they may see; padded with the sequence's own first token, which is
            masked and, unlike a foreign one, cannot bring in what is not finite.
        positions: [b, t] i64, of the rows.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    is_plain_causal: bool
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return [b, 1, t, n]: 0 where a row may look, -inf elsewhere. Made once for each window and step."""
        if window not in self._masks:
            place = torch.arange(self.keys.shape[1], device=self.keys.device)
            seen = place <= self.positions[..., None]  # [b, t, n]
            if window is not None:
                seen &= place > self.positions[..., None] - window
            # Padding lies beyond every row's position, so causality hides it too.
            self._masks[window] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None]
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share: pool rows to write, [T] i64, and groups with their keys and masks."""

    pool: PagedPool
    write_rows: torch.Tensor
    groups: list[Group]

    @classmethod
    def of(cls, batch: Batch, pool: PagedPool) -> Self:
        """Plan for any batch, on the CPU, and bring the plan to where the pool is."""
        groups: list[Group] = []
        singles: dict[int, list[int]] = defaultdict(list)
        for index, segment in enumerate(batch.segments):
            if segment.num_rows == 1:
                # By the power of two above the length: at most half of the gathered keys are padding.
                singles[(segment.num_keys - 1).bit_length()].append(index)
            else:
                groups.append(_group(batch, [index], pool))
        groups += [_group(batch, indices, pool) for indices in singles.values()]
        return cls(pool, pool.row_of(batch.slots).to(pool.rows.device), groups)


def _group(batch: Batch, indices: list[int], pool: PagedPool) -> Group:
    segments: list[Segment] = [batch.segments[index] for index in indices]
    lengths = [segment.num_keys for segment in segments]
    place = torch.arange(max(lengths)).expand(len(indices), -1)
    place = place.where(place < torch.tensor(lengths)[:, None], 0)
    blocks = batch.block_tables[torch.tensor(indices)].long().gather(1, place // pool.block_tokens)
    keys = pool.row_of(blocks * pool.block_tokens + place % pool.block_tokens)
    rows = torch.cat([torch.arange(s.first_row, s.first_row + s.num_rows) for s in segments])
    is_plain_causal = segments[0].num_context == 0 and segments[0].num_rows > 1
    device = pool.rows.device
    positions = batch.positions[rows].view(len(indices), -1)
    return Group(rows.to(device), keys.to(device), positions.to(device), is_plain_causal)


def paged_attention(
    plan: AttentionPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write the step's K and V of one layer, then attend.

    Args:
        plan: of this step.
        layer: index.
        query: [T, Hq, D], of any float type; Hq is a multiple of the pool's H.
        key: [T, H, D].
        value: [T, H, D].
        scaling: factor of the scores.
        window: a row sees that many last tokens, itself included; None: all.
        softcap: scores are squeezed to (-softcap, softcap); None: not.

    Returns:
        [T, Hq, D], as `query`.
    """
    plan.pool.write(layer, plan.write_rows, key, value)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in plan.groups:
        keys, values = plan.pool.read(layer, group.keys, query.dtype)  # [b, n, H, D]
        b, n, heads, dim = keys.shape
        in_reach = None if window is None or n <= window else window
        # [b, t, H, G, D] -> [b, H, G * t, D]: the query heads of one KV head are rows that share its keys.
        t = group.positions.shape[1]
        asked = query[group.rows].view(b, t, heads, -1, dim)
        answer = _attend(group, asked, keys, values, scaling, in_reach, softcap)
        output[group.rows] = answer.reshape(b * t, -1, dim)
    return output


def _attend(
    group: Group,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """[b, t, H, G, D] queries on [b, n, H, D] keys -> [b, t, H, G, D]; t or b is 1. Keys are never copied."""
    t, per_head = query.shape[1], query.shape[3]
    needs_mask = not group.is_plain_causal or window or softcap
    mask: torch.Tensor | None = group.mask(window, query.dtype) if needs_mask else None
    if t == 1:
        # The query heads of one KV head become rows.
        asked, keys, values = query[:, 0], key.transpose(1, 2), value.transpose(1, 2)  # [b, H, G or n, D]
    else:
        # KV heads become the batch and their query heads the heads, which share K by a stride of 0.
        asked = query[0].permute(1, 2, 0, 3)  # [H, G, t, D]
        keys = key[0].transpose(0, 1)[:, None].expand(-1, per_head, -1, -1)
        values = value[0].transpose(0, 1)[:, None].expand(-1, per_head, -1, -1)
    if softcap is None:
        answer = scaled_dot_product_attention(
            asked, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling
        )
    else:
        assert mask is not None
        scores = torch.tanh(asked @ keys.transpose(-1, -2) * (scaling / softcap)) * softcap + mask
        answer = scores.softmax(-1) @ values
    return answer[:, None] if t == 1 else answer.permute(2, 0, 1, 3)[None]
