"""Which worker holds which prefix, by chain hash, from the workers' numbered events."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Held:
    hashes: set[bytes] = field(default_factory=set)
    last_number: int | None = None
    """Of the last event applied; None right after a snapshot: whatever event comes next continues it."""
    needs_snapshot: bool = True


class PrefixIndex:
    """One set of hashes for each worker. Owned by the router's loop; plain functions.

        (unknown) ──replace──► following ──apply, next number──► following
                                   ▲    └──apply, a gap──► needs a snapshot, deaf to events
                                   └──────────replace──────────┘

    Memory: 49 bytes for a 16-byte hash and 27 to 55 for its place in a set, for each block of each worker.

    A match takes a bisection, which trusts that whoever holds a prefix holds its beginnings. Pools evict the deepest
    blocks first, so that is so but for rare moments; then the answer is a hit of some held prefix, never of one that
    is not held.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Held] = {}

    def replace(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """Take a snapshot: the worker holds exactly these."""
        self._workers[worker_id] = _Held(set(hashes), needs_snapshot=False)

    def apply(self, worker_id: str, number: int, stored: bool, hashes: Iterable[bytes]) -> bool:
        """Take one event.

        Returns:
            Whether it was the next one. If not, what is known stays as it is, and all further events of this worker
            are refused, until `replace`.
        """
        held = self._workers.setdefault(worker_id, _Held())
        if held.last_number is not None and number != held.last_number + 1:
            held.needs_snapshot = True
        if held.needs_snapshot:
            return False
        held.last_number = number
        if stored:
            held.hashes.update(hashes)
        else:
            held.hashes.difference_update(hashes)
        return True

    def forget(self, worker_id: str) -> None:
        """Drop all that is known of a worker."""
        self._workers.pop(worker_id, None)

    def match(self, worker_id: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain `hashes` a worker holds."""
        held = self._workers.get(worker_id)
        if held is None or not hashes or hashes[0] not in held.hashes:
            return 0
        return bisect_left(hashes, True, lo=1, key=lambda prefix: prefix not in held.hashes)

    def needs_snapshot(self, worker_id: str) -> bool:
        """Whether the worker's events cannot be followed."""
        held = self._workers.get(worker_id)
        return held is None or held.needs_snapshot

    def num_blocks_of(self, worker_id: str) -> int:
        """Return how many blocks a worker holds."""
        held = self._workers.get(worker_id)
        return 0 if held is None else len(held.hashes)

    @property
    def num_blocks(self) -> int:
        """Blocks of all workers together."""
        return sum(len(held.hashes) for held in self._workers.values())
