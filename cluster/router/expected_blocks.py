"""Blocks that prompts will leave where they are prefilled: known before the workers announce them.

A later prompt of the same beginning, sent to the same worker, queues behind the earlier one and finds them. Blocks that
will land at a decode worker are not expected: a prompt that comes before they do does not wait for them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

_AGE_MAX_S = 300.0
"""A prompt that is not prefilled after so long is not expected to be."""
_WORKERS_MAX = 32
"""Workers found for one prompt; beyond it, others are left out."""
_LENGTHS_MAX = 4096
"""Lengths of prompts, in blocks, whose marks are at hand."""


@dataclass(slots=True, eq=False)
class _Expected:
    worker_id: str
    chain: Sequence[bytes]
    added_at: float
    is_gone: bool = False


class ExpectedBlocks:
    """Prompts under way, by worker. Owned by the router's loop; plain functions, time is told.

    Prompts are found by some of their prefixes: those of 1, 2, 4, 8, … blocks. The rest of what two prompts have in
    common is bisected, so an answer is exact but where a later prompt on the same worker hides an earlier one.
    """

    def __init__(self) -> None:
        self._by_prefix: dict[bytes, dict[str, _Expected]] = {}
        self._by_key: dict[object, _Expected] = {}
        self._untold: dict[str, list[_Expected]] = {}
        """By worker: prefilled, but the worker has not reported since."""
        self._ageing: deque[_Expected] = deque()

    def __len__(self) -> int:
        """Return how many prefixes are remembered."""
        return len(self._by_prefix)

    def add(self, key: object, worker_id: str, chain: Sequence[bytes], now: float) -> None:
        """Expect a prompt's blocks on a worker, until `settle` or `drop` with the same key."""
        self._expire(now)
        if not chain:
            return
        entry = self._by_key[key] = _Expected(worker_id, chain, now)
        self._ageing.append(entry)
        for index in _marks(len(chain)):
            self._by_prefix.setdefault(chain[index], {})[worker_id] = entry

    def settle(self, key: object) -> None:
        """The prompt was prefilled: the worker's next report tells of its blocks. An unknown key is all right."""
        entry = self._by_key.pop(key, None)
        if entry is not None and not entry.is_gone:
            self._untold.setdefault(entry.worker_id, []).append(entry)

    def reported(self, worker_id: str) -> None:
        """Leave what a worker has prefilled to its own events, which are known up to now."""
        for entry in self._untold.pop(worker_id, ()):
            self._forget(entry)

    def drop(self, key: object) -> None:
        """The prompt will not be prefilled. An unknown key is all right."""
        entry = self._by_key.pop(key, None)
        if entry is not None:
            self._forget(entry)

    def forget(self, worker_id: str) -> None:
        """A worker is gone, and whatever was to be there."""
        for key in [key for key, entry in self._by_key.items() if entry.worker_id == worker_id]:
            self.drop(key)
        self.reported(worker_id)

    def find(self, chain: Sequence[bytes], now: float) -> Mapping[str, int]:
        """Return how many leading blocks of a chain are expected where."""
        self._expire(now)
        found: dict[str, int] = {}
        if not self._by_prefix:
            return found
        above = len(chain)
        for index in reversed(_marks(len(chain))):
            for worker_id, entry in self._by_prefix.get(chain[index], _NOBODY).items():
                if worker_id in found:
                    continue
                found[worker_id] = _common(chain, entry.chain, index + 1, above)
                if len(found) == _WORKERS_MAX:
                    return found
            above = index
        return found

    def _expire(self, now: float) -> None:
        while self._ageing and (self._ageing[0].is_gone or self._ageing[0].added_at + _AGE_MAX_S <= now):
            self._forget(self._ageing.popleft())

    def _forget(self, entry: _Expected) -> None:
        if entry.is_gone:
            return
        entry.is_gone = True
        for index in _marks(len(entry.chain)):
            prefix = entry.chain[index]
            workers = self._by_prefix.get(prefix, _NOBODY)
            if workers.get(entry.worker_id) is entry:
                del workers[entry.worker_id]
                if not workers:
                    del self._by_prefix[prefix]


_NOBODY: dict[str, _Expected] = {}


@lru_cache(_LENGTHS_MAX)
def _marks(num_blocks: int) -> Sequence[int]:
    """Return the indices of the blocks by which a prompt is found."""
    return tuple((1 << power) - 1 for power in range(num_blocks.bit_length()))


def _common(one: Sequence[bytes], other: Sequence[bytes], low: int, high: int) -> int:
    """Return how many leading blocks two chains have in common: at least `low`, at most `high`."""
    high = min(high, len(one), len(other))
    if low < high and one[low] != other[low]:  # as a rule, what many prompts begin with ends together
        return low
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
