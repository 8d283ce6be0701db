"""Scheduled chunks -> the flat inputs of one forward pass: a ragged batch without padding."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch

from engine.step import ScheduledChunk


class Segment(NamedTuple):
    """A sequence's rows `[first_row, first_row + num_rows)` of the batch; the first one's position is `num_context`.

    They attend to positions `[0, num_context + num_rows)`, causally. Kernels may add up in another order for a
    generated token than for prompt tokens; which of the two a token is follows from the sequence alone, never from how
    many rows a step happens to have. So neither chunks, nor what was found in a prefix cache, nor a move to another
    worker changes a bit of a sequence's logits where a backend's rows do not depend on each other.
    """

    first_row: int
    num_rows: int
    num_context: int
    is_decode: bool = False
    """One generated token; else tokens of the prompt."""

    @property
    def num_keys(self) -> int:
        """Tokens that the chunk's last row sees."""
        return self.num_context + self.num_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens in B segments. Row t of every [T] tensor is one token; segments lie one after the other.

    Attributes:
        token_ids: [T] i64.
        positions: [T] i64, place of the token in its sequence.
        slots: [T] i64, `block * block_tokens + offset`: where the token's K and V go.
        segments: in the order of the scheduled batch; a chunk that goes beyond its prompt has several.
        block_tables: [B, most blocks] i32; padded with the row's own first block, so that what is read beyond a
            sequence's end is finite whenever the sequence is.
        logit_rows: [R] i64, rows whose logits are wanted: the last row of each chunk that reaches its sequence's end.
        greedy_rows: [G] i64, such rows of which only the token with the greatest logit is wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    segments: tuple[Segment, ...]
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    greedy_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Rows, T."""
        return self.token_ids.shape[0]

    @property
    def asked_rows(self) -> torch.Tensor:
        """Rows that anything is wanted of, [R + G] i64: those of logits first."""
        return torch.cat([self.logit_rows, self.greedy_rows])

    def asking_all(self) -> Self:
        """Return this batch, asking for the logits of every row."""
        return replace(self, logit_rows=torch.arange(self.num_tokens), greedy_rows=torch.arange(0))


def make_batch(chunks: Seq[ScheduledChunk], block_tokens: int) -> Batch:
    """Lay `chunks` one after the other; at least one."""
    token_ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    greedy_rows: list[int] = []
    tables: list[list[int]] = []
    for chunk in chunks:
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        end = start + chunk.num_tokens
        row = len(token_ids)
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        for segment in _segments(row, start, end, sequence.num_prompt_tokens):
            segments.append(segment)
            tables.append(sequence.block_table[: -(-segment.num_keys // block_tokens)])
        if chunk.reaches_end:
            (logit_rows if sequence.needs_logits else greedy_rows).append(len(token_ids) - 1)
    width = max(map(len, tables))
    padded = [table + table[:1] * (width - len(table)) for table in tables]
    block_tables = torch.from_numpy(np.array(padded, np.int32))  # a third of the time of torch.tensor
    place = torch.tensor(positions)
    segment_of_row = torch.arange(len(segments)).repeat_interleave(torch.tensor([s.num_rows for s in segments]))
    slots = block_tables[segment_of_row, place // block_tokens].long() * block_tokens + place % block_tokens
    asked = (torch.tensor(rows, dtype=torch.int64) for rows in (logit_rows, greedy_rows))
    return Batch(torch.tensor(token_ids), place, slots, tuple(segments), block_tables, *asked)


def _segments(row: int, start: int, end: int, num_prompt_tokens: int) -> Iterator[Segment]:
    """Split positions [start, end), the first of which is in `row`: prompt tokens together, generated ones alone."""
    boundary = min(max(start, num_prompt_tokens), end)
    if boundary > start:
        yield Segment(row, boundary - start, start)
    for position in range(boundary, end):
        yield Segment(row + position - start, 1, position, is_decode=True)
