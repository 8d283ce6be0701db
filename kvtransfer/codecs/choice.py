"""Choosing a codec that loses nothing for one link, by what was measured of the link and of the codec."""

import math

from kvtransfer.codecs.registry import AUTO, RAW

LOSSLESS = "lossless"
MEASURED_BYTES_MIN = 1024 * 1024
"""Shorter busy stretches measure delays, not the rate."""
BUSY_MIN = 0.5
"""A link that is busy for less of the time is not what anybody waits for: coding would only cost processor time."""
GAIN_MIN = 1.1
TRIAL_BELOW = 400e6
"""Bytes a second. On slower links `lossless` is tried before anything is known of it: a core codes 150 to 500 MB/s."""
TRIAL_EVERY = 64
"""Transfers after which what is known of a codec that was not worth it is forgotten: contents differ."""
_WEIGHT = 0.3
"""Of the newest measurement of a rate."""
_MEMORY_S = 5.0
"""How far back a link's being busy matters."""


class CodecChoice:
    """Knows one link to one receiver. Owned by its connection; times are the loop's, in seconds."""

    def __init__(self, now: float) -> None:
        self.link_rate: float | None = None
        """Bytes a second while busy."""
        self.busy_share = 0.0
        """Of the time, how much the link had something under way."""
        self._codec_rate: float | None = None
        self._ratio = 1.0
        self._busy_since: float | None = None
        self._busy_bytes = 0
        self._seen_until = now
        self._num_chosen = 0

    def sent(self, now: float) -> None:
        """Note that a piece is under way."""
        if self._busy_since is None:
            self._busy_since, self._busy_bytes = now, 0

    def arrived(self, num_bytes: int, is_compressed: bool, is_idle: bool, now: float) -> None:
        """Note that a piece was acknowledged: its bytes in the pool, and whether nothing else is under way."""
        if self._busy_since is None:
            return
        self._busy_bytes += round(num_bytes / self._ratio) if is_compressed else num_bytes
        if not is_idle and self._busy_bytes < 4 * MEASURED_BYTES_MIN:
            return
        busy = max(now - self._busy_since, 1e-6)
        span = max(now - self._seen_until, busy)
        self.busy_share += (1 - math.exp(-span / _MEMORY_S)) * (busy / span - self.busy_share)
        if self._busy_bytes >= MEASURED_BYTES_MIN:
            self.link_rate = _mixed(self.link_rate, self._busy_bytes / busy)
        self._busy_since, self._busy_bytes, self._seen_until = None if is_idle else now, 0, now

    def coded(self, raw_bytes: int, encoded_bytes: int, seconds: float) -> None:
        """Note what `lossless` made of a piece."""
        self._codec_rate = _mixed(self._codec_rate, raw_bytes / max(seconds, 1e-6))
        self._ratio += _WEIGHT * (raw_bytes / encoded_bytes - self._ratio)

    def choose(self, asked: str) -> str:
        """Return the codec of the next transfer whose ticket asks for `asked`."""
        if asked != AUTO:
            return asked
        if self.link_rate is None or self.busy_share < BUSY_MIN:
            return RAW
        self._num_chosen += 1
        if self._codec_rate is None:
            return LOSSLESS if self.link_rate < TRIAL_BELOW else RAW
        if min(self._codec_rate, self._ratio * self.link_rate) >= GAIN_MIN * self.link_rate:
            return LOSSLESS
        if self._num_chosen % TRIAL_EVERY == 0:
            self._codec_rate, self._ratio = None, 1.0
        return RAW


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
