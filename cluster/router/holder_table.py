"""Blocks of one tier and who holds each: a dict from hash to a set of workers, with small keys and shared sets."""

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

_STALE_MIN = 1024
"""Forgotten keys that an entry's list may have beyond as many as it holds, before it is cleaned."""


class Tier(enum.IntEnum):
    """Where a worker keeps a block. What is slower has a larger number."""

    POOL = 0
    HOST = 1
    DISK = 2


def key_of(prefix: bytes) -> int:
    """Return the key of a chain hash: 60 bits, the largest int of 32 bytes.

    Two prefixes with one key would be taken for each other. With 10 million blocks one lookup in 10^11 meets that, and
    its price is a needless detour: workers go by whole hashes.
    """
    return hash(prefix) >> 4  # of bytes: 64 keyed bits, equal within a process, and remembered by the object


@dataclass(slots=True)
class Entry:
    """One worker's part of a table."""

    bit: int
    """Its place in a set of workers: 1 << number."""
    num_keys: int = 0
    keys: "array[int]" = field(default_factory=lambda: array("q"))
    """All that it holds, and some that it did: finds them again when the worker is lost."""


class HolderTable:
    """Sets of workers, as bit sets, by key. Owned by a PrefixIndex.

    Memory for a block of one worker: 32 bytes for the key, 30 to 60 for its place in the dict, 8 to 18 in the entry's
    list. A set of one worker is that worker's `bit` itself. Larger sets are shared by the blocks of an event, which as
    a rule have the same holders; a further worker that holds a block costs a place in its list, and its share of a set.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    @property
    def num_keys(self) -> int:
        """Different blocks."""
        return len(self._holders)

    def holders(self, prefix: bytes) -> int:
        """Return who holds a block, as a bit set."""
        return self._holders.get(hash(prefix) >> 4, 0)  # key_of, without a call: this is the index's inner loop

    def store(self, entry: Entry, hashes: Iterable[bytes]) -> None:
        """Add a worker to these blocks' holders."""
        holders, bit, added = self._holders, entry.bit, []
        united: dict[int, int] = {}
        for key in map(key_of, hashes):
            before = holders.get(key)
            if before is None:
                holders[key] = bit
            elif before & bit:
                continue
            else:
                holders[key] = united.get(before) or united.setdefault(before, before | bit)
            added.append(key)
        entry.num_keys += len(added)
        entry.keys.extend(added)
        self._clean(entry)

    def evict(self, entry: Entry, hashes: Iterable[bytes]) -> None:
        """Take a worker from these blocks' holders."""
        self._remove(entry, map(key_of, hashes))
        self._clean(entry)

    def clear(self, entry: Entry) -> None:
        """Take a worker from all blocks' holders, in time proportional to what it holds."""
        self._remove(entry, entry.keys)
        assert entry.num_keys == 0
        entry.keys = array("q")

    def _remove(self, entry: Entry, keys: Iterable[int]) -> None:
        holders, bit, count = self._holders, entry.bit, 0
        left: dict[int, int] = {}
        for key in keys:
            before = holders.get(key, 0)
            if not before & bit:
                continue
            count += 1
            if before == bit:
                del holders[key]
            else:
                holders[key] = left.get(before) or left.setdefault(before, before ^ bit)
        entry.num_keys -= count

    def _clean(self, entry: Entry) -> None:
        if len(entry.keys) > 2 * entry.num_keys + _STALE_MIN:
            holders, bit = self._holders, entry.bit
            entry.keys = array("q", [key for key in dict.fromkeys(entry.keys) if holders.get(key, 0) & bit])
