"""Which block is free, used or kept, and which prefix it holds. Knows ids and hashes, no bytes and no torch."""

import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from common.errors import OverloadedError
from engine.cache_log import CacheChange, CacheLog

Evicted = Callable[[Sequence[tuple[int, bytes]]], None]
"""Is told of blocks and the prefixes they hold, just before others may write to them."""


class BlockPool:
    """Hands out blocks and remembers which prefixes they hold.

        free ──allocate──► used ──release, not sealed──► free
          ▲                 ▲ │
        evict            match release, sealed
          └──── kept ◄──────┴─┘

    A used block counts its holders; only the last release frees or keeps it. Kept blocks are evicted least recently
    used first, the deepest block of a released prefix before the blocks it depends on.
    Owned by one worker loop; not safe to share between threads.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._holders: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.log = CacheLog()
        self.on_evict: Evicted | None = None

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder."""
        return len(self._holders)

    @property
    def num_kept(self) -> int:
        """Blocks without a holder that still hold a prefix."""
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free and kept."""
        return len(self._free) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one holder each, evicting least recently used kept ones if need be.

        `on_evict` hears of the evicted ones before this returns.

        Raises:
            OverloadedError: fewer than `count` are available; nothing was taken.
        """
        assert count >= 0
        if count > self.num_available:
            raise OverloadedError(f"need {count} blocks, {self.num_available} available")
        evicted = [self._kept.popitem(last=False)[0] for _ in range(count - len(self._free))]
        if evicted:
            hashes = [self._forget(block_id) for block_id in evicted]
            self.log.note(False, hashes)
            self._free.extend(evicted)
            if self.on_evict is not None:
                self.on_evict(list(zip(evicted, hashes, strict=True)))
        taken = [self._free.popleft() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Take the blocks of the longest held prefix of `hashes`; the caller shares them and releases them."""
        matched = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            self._kept.pop(block_id, None)
            self._holders[block_id] = self._holders.get(block_id, 0) + 1
            matched.append(block_id)
        return matched

    def peek(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks `match` would take, without taking or touching them."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._block_of:
                return count
        return len(hashes)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Return what `peek` does, by bisection: the same where held blocks come after held ones."""
        return bisect.bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._block_of)

    def seal(self, block_id: int, hash: bytes) -> None:  # noqa: A002  # the word that the glossary has for it
        """Note that a used block is full and final and holds the prefix `hash`, so that `match` finds it.

        When another block already holds that prefix, it stays the one that is found. Sealing a block again with the
        same hash changes nothing.
        """
        self.seal_all([block_id], [hash])

    def seal_all(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Seal several blocks, each with its hash, as one change."""
        stored = []
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            assert block_id in self._holders, f"block {block_id} is not used"
            held = self._hash_of.get(block_id)
            assert held is None or held == block_hash, f"block {block_id} is sealed and cannot hold another prefix"
            if held is None and block_hash not in self._block_of:
                self._hash_of[block_id] = block_hash
                self._block_of[block_hash] = block_id
                stored.append(block_hash)
        if stored:
            self.log.note(True, stored)

    def release(self, block_ids: Iterable[int]) -> None:
        """Give up one holder's share of each block; give the blocks of a sequence in token order."""
        for block_id in reversed(list(block_ids)):
            holders = self._holders[block_id] - 1
            if holders:
                self._holders[block_id] = holders
                continue
            del self._holders[block_id]
            if block_id in self._hash_of:
                self._kept[block_id] = None
            else:
                self._free.append(block_id)

    def drain_events(self) -> list[CacheChange]:
        """Return what changed since the last call, in order; neighbours of one kind are one change."""
        return self.log.drain()

    def snapshot(self) -> tuple[int, list[bytes]]:
        """Return the number of the last change, drained or not, and all hashes held after it."""
        return self.log.close_number(), list(self._block_of)

    def check(self) -> None:
        """Assert every invariant; for tests, linear in the pool's size."""
        free, used, kept = set(self._free), set(self._holders), set(self._kept)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(used) + len(kept) == self.num_blocks, "a block is lost or in two states"
        assert free | used | kept == set(range(self.num_blocks)), "a block is lost"
        assert all(count > 0 for count in self._holders.values()), "a used block has no holder"
        assert kept <= set(self._hash_of) <= used | kept, "a kept block holds nothing, or a free one holds a prefix"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "the two hash tables disagree"

    def _forget(self, block_id: int) -> bytes:
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        return block_hash
