"""A request inside one simulated worker: how long it is and which blocks it has, without a single token."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """What a worker's books and scheduler want of a sequence (engine/bookkeeping.py). Owned by one simulated worker."""

    names: Sequence[bytes]
    """Of all full blocks that it will ever have, in order."""
    num_prompt_tokens: int
    num_tokens: int
    block_tokens: int
    num_computed: int = 0
    num_cached: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, here or elsewhere."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens without KV here."""
        return self.num_tokens - self.num_computed

    @property
    def is_ready(self) -> bool:
        """Always: nothing here obeys a grammar."""
        return True

    @property
    def hashes(self) -> Sequence[bytes]:
        """The names of the blocks that are full now."""
        return self.names[: self.num_tokens // self.block_tokens]

    def reusable_hashes(self, block_tokens: int) -> Sequence[bytes]:
        """Return the names of which a cache may be used: the last token is always computed, for its logits."""
        return self.names[: (self.num_tokens - 1) // block_tokens]
