"""Decode steps of fixed shapes, so that a GPU can replay one as a graph instead of being asked for each kernel."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.attention.paged import AttentionPlan, Group, PagedPool
from engine.batch import Batch

ROWS_MAX = 256
"""Larger batches keep a GPU busy without a graph."""

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as GraphMemory  # noqa: N811  # torch has no public name for it
Forward = Callable[[torch.Tensor, torch.Tensor, AttentionPlan], torch.Tensor]
"""[T] i64 token ids and positions, and a plan -> [T, V] logits."""


def is_decode_step(batch: Batch) -> bool:
    """Whether every row is one generated token of some sequence, and there are not too many."""
    return len(batch.segments) == batch.num_tokens <= ROWS_MAX and all(s.is_decode for s in batch.segments)


class DecodeStep:
    """Steps of up to `rows` sequences with up to `width` blocks each.

    What differs between two steps of one shape is in one tensor of inputs: token, position and block table of each row.
    What follows from them (slots, keys, masks) is computed on the device, inside the graph. Rows that a batch
    lacks repeat its first one: they write the same bytes to the same slot, and their logits are dropped.

    Args:
        rows: of the shape.
        width: of the shape.
        pool: that is read and written.
        forward: the model.
        graphs: the memory that graphs share, to record the step as one; None: it is computed anew each time.
    """

    def __init__(self, rows: int, width: int, pool: PagedPool, forward: Forward, graphs: "GraphMemory | None") -> None:
        self._inputs = torch.zeros(rows, 2 + width, dtype=torch.int64, device=pool.rows.device)
        self._pool = pool
        self._forward = forward
        self._graphs = graphs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None

    def run(self, batch: Batch) -> torch.Tensor:
        """Return [rows, V] logits; those of `batch` come first."""
        rows, width = batch.block_tables.shape
        inputs = torch.empty(self._inputs.shape, dtype=torch.int64)
        inputs[:rows, 0], inputs[:rows, 1] = batch.token_ids, batch.positions
        inputs[:rows, 2 : 2 + width] = batch.block_tables
        inputs[:rows, 2 + width :] = batch.block_tables[:, :1]
        inputs[rows:] = inputs[0]
        self._inputs.copy_(inputs)
        if self._graphs is None:
            return self._compute()
        if self._graph is None:
            self._record()
        assert self._graph is not None
        assert self._logits is not None
        self._graph.replay()
        return self._logits

    def _compute(self) -> torch.Tensor:
        return self._forward(self._inputs[:, 0], self._inputs[:, 1], self._plan())

    def _plan(self) -> AttentionPlan:
        """Plan as AttentionPlan.of does, by operations that need no look at a value."""
        pool, tables, positions = self._pool, self._inputs[:, 2:], self._inputs[:, 1:2]
        places = torch.arange(tables.shape[1] * pool.block_tokens, device=tables.device)
        keys = _slots(pool, tables, torch.where(places <= positions, places, 0))
        rows = torch.arange(tables.shape[0], device=tables.device)
        write_rows = pool.row_of(_slots(pool, tables, positions))[:, 0]
        return AttentionPlan(pool, write_rows, [Group(rows, pool.row_of(keys), positions, is_plain_causal=False)])

    def _record(self) -> None:
        """Capture; the runs before it let libraries set themselves up, and write what the first replay writes again."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=self._graphs, capture_error_mode="thread_local"):
            self._logits = self._compute()


def _slots(pool: PagedPool, tables: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the slots of `places`, [b, n], of sequences with block tables [b, w]."""
    blocks = tables.gather(1, places // pool.block_tokens)
    return blocks * pool.block_tokens + places % pool.block_tokens


class DecodeSteps:
    """One `DecodeStep` for each shape in use: powers of two in rows and width, so there are few. One thread's."""

    def __init__(self, pool: PagedPool, forward: Forward, is_graph: bool) -> None:
        self._pool = pool
        self._forward = forward
        # One at a time is replayed, and its logits are copied at once: they can all work in the same memory.
        self._graphs = torch.cuda.graph_pool_handle() if is_graph else None
        self._steps: dict[tuple[int, int], DecodeStep] = {}

    def run(self, batch: Batch) -> torch.Tensor:
        """Return [R + G, V] logits of `batch.asked_rows`; see `is_decode_step`."""
        rows, width = batch.block_tables.shape
        shape = (_power_of_two(rows), _power_of_two(width))
        if shape not in self._steps:
            self._steps[shape] = DecodeStep(*shape, self._pool, self._forward, self._graphs)
        return self._steps[shape].run(batch)[batch.asked_rows.to(self._pool.rows.device)]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
