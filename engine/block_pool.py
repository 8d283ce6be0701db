"""Which block is free, used or kept, and which prefix it holds. Knows ids and hashes, no bytes and no torch."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.errors import OverloadedError

PENDING_HASHES_MAX = 1 << 16
"""Undrained cache changes beyond which they are dropped: the gap in the numbers makes watchers ask for a snapshot."""


class CacheChange(NamedTuple):
    """Prefixes that became findable (`stored`) or were lost. Numbers have no gaps but for dropped changes."""

    number: int
    stored: bool
    hashes: list[bytes]


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
        self._pending: list[CacheChange] = []
        self._pending_hashes = 0
        self._last_number = 0
        self._mergeable = False

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

        Raises:
            OverloadedError: fewer than `count` are available; nothing was taken.
        """
        assert count >= 0
        if count > self.num_available:
            raise OverloadedError(f"need {count} blocks, {self.num_available} available")
        evicted = [self._kept.popitem(last=False)[0] for _ in range(count - len(self._free))]
        if evicted:
            self._note(False, [self._forget(block_id) for block_id in evicted])
            self._free.extend(evicted)
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

    def seal(self, block_id: int, hash: bytes) -> None:  # noqa: A002  # the word that the glossary has for it
        """Note that a used block is full and final and holds the prefix `hash`, so that `match` finds it.

        When another block already holds that prefix, it stays the one that is found. Sealing a block again with the
        same hash changes nothing.
        """
        assert block_id in self._holders, f"block {block_id} is not used"
        held = self._hash_of.get(block_id)
        assert held is None or held == hash, f"block {block_id} is sealed and cannot hold another prefix"
        if held is None and hash not in self._block_of:
            self._hash_of[block_id] = hash
            self._block_of[hash] = block_id
            self._note(True, [hash])

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
        pending, self._pending, self._pending_hashes = self._pending, [], 0
        return pending

    def snapshot(self) -> tuple[int, list[bytes]]:
        """Return the number of the last change, drained or not, and all hashes held after it."""
        # Changes from here on get numbers of their own, so that a reader knows which ones the snapshot includes.
        self._mergeable = False
        return self._last_number, list(self._block_of)

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

    def _note(self, stored: bool, hashes: list[bytes]) -> None:
        if self._pending_hashes + len(hashes) > PENDING_HASHES_MAX:
            self.drain_events()
            self._mergeable = False
        self._pending_hashes += len(hashes)
        if self._mergeable and self._pending and self._pending[-1].stored == stored:
            self._pending[-1].hashes.extend(hashes)
            return
        self._last_number += 1
        self._pending.append(CacheChange(self._last_number, stored, hashes))
        self._mergeable = True
