"""Who holds how much of one prompt: the answer of the prefix index to one question."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Level(NamedTuple):
    """Workers that hold the same number of leading blocks."""

    num_blocks: int
    holders: int
    """A bit set, in the bits of `Hits.bits`."""


Levels = Sequence[Level]
"""By number of blocks, the fewest first; nobody is in two of them, who holds nothing is in none."""


class Hits(NamedTuple):
    """Leading blocks of a prompt, by worker. Holds for the moment in which it was asked for."""

    bits: Mapping[str, int]
    """Each worker's bit."""
    levels: Levels
    """Of all tiers together."""
    in_pool: Levels
    """Of the pools alone: what needs no bringing back."""
    in_memory: Levels
    """Of pools and host memory: the rest is on disk."""

    def of(self, worker_id: str) -> int:
        """Return how many leading blocks a worker holds."""
        return _blocks(self.levels, self.bits.get(worker_id, 0))

    def pool_of(self, worker_id: str) -> int:
        """Return how many of them are in its pool."""
        return _blocks(self.in_pool, self.bits.get(worker_id, 0))

    def memory_of(self, worker_id: str) -> int:
        """Return how many of them are in its pool or its host's memory."""
        return _blocks(self.in_memory, self.bits.get(worker_id, 0))


NO_HITS = Hits({}, (), (), ())
"""Of a prompt that nobody holds."""


def _blocks(levels: Levels, bit: int) -> int:
    for level in levels:
        if level.holders & bit:
            return level.num_blocks
    return 0


def levels_of(num_blocks: int, holders: Callable[[int], int]) -> Levels:
    """Sort the holders of a chain by how much of it they hold.

    Args:
        num_blocks: of the chain, at least 1.
        holders: who holds the block of an index, as a bit set; whoever holds one holds all before it.
    """
    levels: list[Level] = []
    held, low = holders(0), 0
    while held:
        at, high = low, num_blocks  # all of `held` hold block `at`; not all of them hold block `high`
        while high - at > 1:
            middle = (at + high) // 2
            if holders(middle) & held == held:
                at = middle
            else:
                high = middle
        still = holders(high) & held if high < num_blocks else 0
        levels.append(Level(high, held & ~still))
        held, low = still, high
    return levels
