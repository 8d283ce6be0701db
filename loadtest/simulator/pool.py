"""A worker's blocks, without their bytes: which are used, which are kept, which prefix each holds."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CacheListener(Protocol):
    """Hears what a pool stores and evicts, as the router's index does."""

    def changed(self, stored: bool, names: Sequence[bytes]) -> None:
        """Take one event."""
        ...


@dataclass(slots=True)
class Lease:
    """What one sequence holds of a pool."""

    names: list[bytes]
    """Named blocks, in order from the prompt's beginning; shared with others."""
    num_private: int
    """Blocks without a name yet."""


class SimulatedPool:
    """Same rules as the engine's block pool: shared prefixes, least recently used kept blocks go first, deepest first.

    Owned by one simulated worker.
    """

    def __init__(self, num_blocks: int, listener: CacheListener) -> None:
        self._num_blocks = num_blocks
        self._listener = listener
        self._used: dict[bytes, int] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._num_private = 0

    @property
    def num_available(self) -> int:
        """Blocks that are free or only kept."""
        return self._num_blocks - len(self._used) - self._num_private

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return len(self._used) + self._num_private

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.num_available - len(self._kept)

    def match(self, names: Sequence[bytes]) -> int:
        """Return how many leading blocks are held."""
        for count, name in enumerate(names):
            if name not in self._used and name not in self._kept:
                return count
        return len(names)

    def reserve(self, names: Sequence[bytes], num_blocks: int) -> Lease | None:
        """Take the held prefix of `names` and as many free blocks as make `num_blocks`; None if there is no room."""
        hits = names[: self.match(names)]
        revived = sum(name not in self._used for name in hits)
        extra = num_blocks - len(hits)
        if extra + revived > self.num_available:
            return None
        for name in hits:
            self._kept.pop(name, None)
            self._used[name] = self._used.get(name, 0) + 1
        self._num_private += extra
        self._evict()
        return Lease(list(hits), extra)

    def seal(self, lease: Lease, names: Sequence[bytes]) -> None:
        """The lease's blocks now hold all of `names`.

        A copy of what another block holds is merged with it; the engine keeps the copy until its sequence ends.
        """
        stored = []
        fresh = names[len(lease.names) :]
        for name in fresh:
            if name in self._kept:
                del self._kept[name]
            elif name not in self._used:
                stored.append(name)
            self._used[name] = self._used.get(name, 0) + 1
        lease.names += fresh
        lease.num_private -= len(fresh)
        self._num_private -= len(fresh)
        if stored:
            self._listener.changed(True, stored)

    def release(self, lease: Lease) -> None:
        """Give all back; what has a name stays kept."""
        for name in reversed(lease.names):
            left = self._used[name] - 1
            if left:
                self._used[name] = left
            else:
                del self._used[name]
                self._kept[name] = None
        self._num_private -= lease.num_private
        lease.names, lease.num_private = [], 0

    def check(self, is_idle: bool) -> None:
        """Assert the invariants; when idle, nothing is used."""
        assert len(self._used) + len(self._kept) + self._num_private <= self._num_blocks
        assert self._num_private >= 0
        assert not is_idle or (not self._used and not self._num_private)

    def _evict(self) -> None:
        evicted = []
        while len(self._used) + len(self._kept) + self._num_private > self._num_blocks:
            evicted.append(self._kept.popitem(last=False)[0])
        if evicted:
            self._listener.changed(False, evicted)
