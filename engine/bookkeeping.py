"""The books of a worker: its pool, and what of a sequence is computed. Knows no model and no torch.

A worker's engine keeps them for its loop; a simulated worker keeps them alone.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from common.errors import InvalidRequestError
from engine.block_pool import BlockPool


class BookedSequence(Protocol):
    """What books and schedulers know of a sequence: how long it is, not which tokens it has."""

    block_table: list[int]
    """See engine.sequence.Sequence, as for all of these."""
    num_computed: int
    num_cached: int

    @property
    def num_prompt_tokens(self) -> int: ...  # noqa: D102

    @property
    def num_tokens(self) -> int: ...  # noqa: D102

    @property
    def num_uncomputed(self) -> int: ...  # noqa: D102

    @property
    def is_ready(self) -> bool: ...  # noqa: D102

    @property
    def hashes(self) -> Seq[bytes]: ...  # noqa: D102

    def reusable_hashes(self, block_tokens: int) -> Seq[bytes]: ...  # noqa: D102


class Bookkeeping:
    """One pool and the rules by which sequences use it. Owned by the worker's loop; plain functions."""

    def __init__(self, num_blocks: int, block_tokens: int, context_tokens: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_tokens = block_tokens
        self.context_tokens = context_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def check_prompt_fits(self, num_tokens: int) -> None:
        """Refuse a prompt that the pool could never hold.

        Raises:
            InvalidRequestError: naming need and limit.
        """
        # One token beyond the prompt, so that a sequence alone in the pool can always make progress.
        num_blocks = self.blocks_for(num_tokens + 1)
        if num_blocks > self.pool.num_blocks:
            raise InvalidRequestError(f"the prompt needs {num_blocks} blocks, the pool has {self.pool.num_blocks}")

    def num_held(self, sequence: BookedSequence) -> int:
        """Return about how many of its leading tokens a sequence without blocks would not have to compute."""
        return self.pool.depth(sequence.reusable_hashes(self.block_tokens)) * self.block_tokens

    def num_below(self, hashes: Seq[bytes]) -> int:  # noqa: ARG002 - there is nothing below a pool alone
        """Return how many of the leading `hashes` could be brought back from below the pool."""
        return 0

    def advance(self, sequence: BookedSequence, num_computed: int) -> None:
        """Note that the first `num_computed` tokens have KV in the pool, computed or landed, and seal full blocks."""
        assert sequence.num_computed <= num_computed <= sequence.num_tokens
        first, end = sequence.num_computed // self.block_tokens, num_computed // self.block_tokens
        if first < end:
            self.pool.seal_all(sequence.block_table[first:end], sequence.hashes[first:end])
        sequence.num_computed = num_computed
