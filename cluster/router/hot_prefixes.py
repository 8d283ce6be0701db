"""Which prefixes many requests of late began with: worth computing once more on another worker."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from cluster.router.hits import Hits, Levels

_HALF_LIFE_S = 60.0
_PREFIXES_MAX = 4096
_LEVELS = 4
_USES = 5.0
"""Uses of late for each copy, beyond which a further copy pays."""


class Hot(NamedTuple):
    """The longest hot prefix of a prompt."""

    num_blocks: int
    share: float
    """Of what a further copy costs to compute, in [0, 1): paid by the requests to come."""


NOT_HOT = Hot(0, 0.0)


class _Heat(NamedTuple):
    uses: float
    at: float


class HotPrefixes:
    """Uses of prefixes that somebody holds, fading with time. Owned by the router's loop; plain functions.

    A copy more costs one request the time to compute it, and spares later ones the queue at the present copies. With
    `u` uses of late and `n` copies, what it costs this request is weighed as if `u / (5 n)` requests shared it.
    """

    def __init__(self) -> None:
        self._heat: OrderedDict[bytes, _Heat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heat)

    def use(self, chain: Sequence[bytes], hits: Hits, now: float) -> Hot:
        """Count a prompt, and return what is hot of it."""
        for level in _deepest(hits):
            prefix = chain[level.num_blocks - 1]
            uses = 1.0 + self._uses(prefix, now)
            self._heat[prefix] = _Heat(uses, now)
            self._heat.move_to_end(prefix)
        while len(self._heat) > _PREFIXES_MAX:
            self._heat.popitem(last=False)
        return self.look(chain, hits, now)

    def look(self, chain: Sequence[bytes], hits: Hits, now: float) -> Hot:
        """Return what is hot of a prompt."""
        copies = 0
        for level in _deepest(hits):
            copies += level.holders.bit_count()
            uses = self._uses(chain[level.num_blocks - 1], now)
            if uses > _USES * copies:
                return Hot(level.num_blocks, 1 - _USES * copies / uses)
        return NOT_HOT

    def _uses(self, prefix: bytes, now: float) -> float:
        heat = self._heat.get(prefix)
        return 0.0 if heat is None else heat.uses * 0.5 ** ((now - heat.at) / _HALF_LIFE_S)


def _deepest(hits: Hits) -> Levels:
    return hits.levels[: -_LEVELS - 1 : -1]
