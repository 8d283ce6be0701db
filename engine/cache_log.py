"""What a worker's caches gained and lost, numbered, for whoever follows them from outside."""

import enum
from typing import NamedTuple

PENDING_HASHES_MAX = 1 << 16
"""Undrained changes beyond which they are dropped: the gap in the numbers makes watchers ask for a snapshot."""


class CacheTier(enum.Enum):
    """Where a block is kept."""

    POOL = 0
    HOST = 1
    DISK = 2


class CacheChange(NamedTuple):
    """Prefixes that became findable (`stored`) or were lost. Numbers have no gaps but for dropped changes."""

    number: int
    stored: bool
    hashes: list[bytes]
    tier: CacheTier = CacheTier.POOL


class CacheLog:
    """Changes of all tiers of one worker, in one count. Owned by the worker's loop."""

    def __init__(self) -> None:
        self._pending: list[CacheChange] = []
        self._pending_hashes = 0
        self._last_number = 0
        self._mergeable = False

    def note(self, stored: bool, hashes: list[bytes], tier: CacheTier = CacheTier.POOL) -> None:
        """Add a change; neighbours of one kind become one."""
        if self._pending_hashes + len(hashes) > PENDING_HASHES_MAX:
            self.drain()
            self._mergeable = False
        self._pending_hashes += len(hashes)
        last = self._pending[-1] if self._pending and self._mergeable else None
        if last is not None and (last.stored, last.tier) == (stored, tier):
            last.hashes.extend(hashes)
            return
        self._last_number += 1
        self._pending.append(CacheChange(self._last_number, stored, hashes, tier))
        self._mergeable = True

    def drain(self) -> list[CacheChange]:
        """Return what changed since the last call, in order."""
        pending, self._pending, self._pending_hashes = self._pending, [], 0
        return pending

    def close_number(self) -> int:
        """Return the number of the last change, drained or not, to which nothing is added any more.

        Changes from here on get numbers of their own, so that a reader knows which ones a snapshot includes.
        """
        self._mergeable = False
        return self._last_number
