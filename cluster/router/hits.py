"""Who holds how much of one prompt: the answer of the prefix index to one question."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


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
    names: Sequence[str]
    """The worker of each bit, by the bit's number."""
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

    def those_of(self, holders: int, among: Mapping[str, T], limit: int, first: str = "") -> list[T]:
        """Return at most `limit` of those of `among` (by worker) that are in a bit set, from worker `first` on."""
        found: list[T] = []
        names, get = self.names, among.get
        later = holders & -self.bits.get(first, 1)
        for part in (later, holders ^ later):
            while part:
                rest = part & (part - 1)
                member = get(names[(part ^ rest).bit_length() - 1])
                if member is not None:
                    found.append(member)
                    if len(found) == limit:
                        return found
                part = rest
        return found

    def raised(self, expected: Mapping[str, int]) -> "Hits":
        """Return the hits with these workers' at least so high, in the pool."""
        in_pool = self._raised(self.in_pool, expected)
        in_memory = in_pool if self.in_memory is self.in_pool else self._raised(self.in_memory, expected)
        levels = in_memory if self.levels is self.in_memory else self._raised(self.levels, expected)
        return Hits(self.bits, self.names, levels, in_pool, in_memory)

    def _raised(self, levels: Levels, expected: Mapping[str, int]) -> Levels:
        by_blocks = {level.num_blocks: level.holders for level in levels}
        for worker_id, num_blocks in expected.items():
            bit = self.bits.get(worker_id, 0)
            known = _blocks(levels, bit)
            if bit and num_blocks > known:
                by_blocks[known] = by_blocks.get(known, 0) & ~bit
                by_blocks[num_blocks] = by_blocks.get(num_blocks, 0) | bit
        return [Level(num_blocks, holders) for num_blocks, holders in sorted(by_blocks.items()) if holders]


NO_HITS = Hits({}, (), (), (), ())
"""Of a prompt that nobody holds."""


def _blocks(levels: Levels, bit: int) -> int:
    for level in levels:
        if level.holders & bit:
            return level.num_blocks
    return 0


def levels_of(chain: Sequence[bytes], holders: Callable[[bytes], int]) -> Levels:
    """Sort the holders of a chain by how much of it they hold.

    Args:
        chain: hashes of at least one block.
        holders: who holds a block, as a bit set; whoever holds one holds all before it.
    """
    levels: list[Level] = []
    num_blocks = len(chain)
    held, low = holders(chain[0]), 0
    while held:
        at, high = low, num_blocks  # all of `held` hold block `at`; not all of them hold block `high`
        while high - at > 1:
            middle = (at + high) // 2
            if holders(chain[middle]) & held == held:
                at = middle
            else:
                high = middle
        still = holders(chain[high]) & held if high < num_blocks else 0
        levels.append(Level(high, held & ~still))
        held, low = still, high
    return levels
