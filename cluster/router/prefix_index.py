"""Which worker holds which prefix, and in which tier, by chain hash, from the workers' numbered events."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.router.hits import NO_HITS, Hits, Levels, levels_of
from cluster.router.holder_table import Entry, HolderTable, Tier


@dataclass(slots=True)
class _Held:
    """What is known of one worker."""

    entries: dict[Tier, Entry]
    last_number: int | None = None
    """Of the last event applied; None right after a snapshot: whatever event comes next continues it."""
    needs_snapshot: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All blocks that a worker holds."""

    pool: Iterable[bytes] = ()
    host: Iterable[bytes] = ()
    disk: Iterable[bytes] = ()


class PrefixIndex:
    """One table of holders for each tier. Owned by the router's loop; plain functions.

        (unknown) ──replace──► following ──apply, next number──► following
                                   ▲    └──apply, a gap──► needs a snapshot, deaf to events
                                   └──────────replace──────────┘

    Memory: see HolderTable, at most 104 bytes for each block of each worker, 109 with a thousand workers, less where
    several hold it (measured by `make bench-router`).

    A match bisects the chain for all holders together. It trusts that whoever holds a prefix, in whichever tier, holds
    its beginnings. Pools evict the deepest blocks first, so that is so but for rare moments; then the answer is a hit
    of some held prefix, never of one that is not held.
    """

    def __init__(self) -> None:
        self._tables = {tier: HolderTable() for tier in Tier}
        self._workers: dict[str, _Held] = {}
        self._bits: dict[str, int] = {}
        self._names: list[str] = []
        self._free_bits: list[int] = []

    def replace(self, worker_id: str, hashes: Iterable[bytes] | Snapshot) -> None:
        """Take a snapshot: the worker holds exactly these; bare hashes are in its pool."""
        snapshot = hashes if isinstance(hashes, Snapshot) else Snapshot(hashes)
        held = self._held(worker_id)
        self._clear(held)
        for tier, named in ((Tier.POOL, snapshot.pool), (Tier.HOST, snapshot.host), (Tier.DISK, snapshot.disk)):
            self._tables[tier].store(held.entries[tier], named)
        held.last_number, held.needs_snapshot = None, False

    def apply(self, worker_id: str, number: int, stored: bool, hashes: Iterable[bytes], tier: Tier = Tier.POOL) -> bool:
        """Take one event.

        Returns:
            Whether it was the next one. If not, what is known stays as it is, and all further events of this worker
            are refused, until `replace`.
        """
        held = self._held(worker_id)
        if held.last_number is not None and number != held.last_number + 1:
            held.needs_snapshot = True
        if held.needs_snapshot:
            return False
        held.last_number = number
        change = self._tables[tier].store if stored else self._tables[tier].evict
        change(held.entries[tier], hashes)
        return True

    def forget(self, worker_id: str) -> None:
        """Drop all that is known of a worker; takes time in proportion to what it holds."""
        held = self._workers.pop(worker_id, None)
        if held is not None:
            self._clear(held)
            self._free_bits.append(self._bits.pop(worker_id))

    def find(self, chain: Sequence[bytes]) -> Hits:
        """Return who holds how many leading blocks of a chain."""
        if not chain:
            return NO_HITS
        in_pool = _levels(chain, [self._tables[Tier.POOL]])
        in_memory = levels = in_pool
        if self._tables[Tier.HOST].num_keys:
            in_memory = levels = _levels(chain, [self._tables[Tier.POOL], self._tables[Tier.HOST]])
        if self._tables[Tier.DISK].num_keys:
            levels = _levels(chain, list(self._tables.values()))
        return Hits(self._bits, self._names, levels, in_pool, in_memory)

    def match(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain `hashes` a worker holds, in whichever tier."""
        return self.find(hashes).of(worker_id)

    def needs_snapshot(self, worker_id: str) -> bool:
        """Whether the worker's events cannot be followed."""
        held = self._workers.get(worker_id)
        return held is None or held.needs_snapshot

    def num_blocks_of(self, worker_id: str) -> int:
        """Return how many blocks a worker holds; one in two tiers counts twice."""
        held = self._workers.get(worker_id)
        return 0 if held is None else sum(entry.num_keys for entry in held.entries.values())

    def holds_any(self, worker_id: str) -> bool:
        """Whether a worker holds a block."""
        held = self._workers.get(worker_id)
        if held is not None:
            for entry in held.entries.values():
                if entry.num_keys:
                    return True
        return False

    @property
    def num_blocks(self) -> int:
        """Blocks of all workers together."""
        return sum(self.num_blocks_of(worker_id) for worker_id in self._workers)

    def _held(self, worker_id: str) -> _Held:
        held = self._workers.get(worker_id)
        if held is None:
            if self._free_bits:
                bit = self._free_bits.pop()
                self._names[bit.bit_length() - 1] = worker_id
            else:
                bit = 1 << len(self._names)
                self._names.append(worker_id)
            self._bits[worker_id] = bit
            held = self._workers[worker_id] = _Held({tier: Entry(bit) for tier in Tier})
        return held

    def _clear(self, held: _Held) -> None:
        for tier, entry in held.entries.items():
            self._tables[tier].clear(entry)


def _levels(chain: Sequence[bytes], tables: Sequence[HolderTable]) -> Levels:
    if len(tables) == 1:
        return levels_of(chain, tables[0].holders)

    def holders(prefix: bytes) -> int:
        found = 0
        for table in tables:
            found |= table.holders(prefix)
        return found

    return levels_of(chain, holders)
