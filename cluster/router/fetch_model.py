"""What it takes to have KV pushed by another worker, learned from each worker's own reports."""

import math
from typing import NamedTuple

ASK_S = 5e-3
"""Of a fetch, whatever is fetched: the holder is asked, and reads the question."""
STARTING_TOKEN_S = 1e-5
"""Of each token, before anything was fetched. Too little is put right by the first fetch that succeeds; with too much
nothing is ever fetched. One that fails, or takes too long for its worker, teaches nothing."""
_TOKEN_MIN_S = 1e-8
_GAIN, _SURPRISE_MAX = 0.3, 1.0
"""Weight of a later observation, and the logarithm up to which it may surprise: one disturbed fetch changes little."""


class FetchTotals(NamedTuple):
    """What a worker has fetched since it started. Differences of two of them are observations."""

    fetches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """From the asking until all was there, added up."""


class FetchLearner:
    """Follows the seconds that a fetched token takes to arrive at one worker.

    A worker that has fetched nothing is taken to be like the others: `elders` learns from all workers.
    """

    def __init__(self, elders: "FetchLearner | None" = None) -> None:
        self._elders = elders
        self._token_s = STARTING_TOKEN_S
        self._is_fresh = True
        self._before: FetchTotals | None = None

    @property
    def token_s(self) -> float:
        """Seconds for each token, beside ASK_S."""
        return self._elders.token_s if self._is_fresh and self._elders is not None else self._token_s

    def report(self, totals: FetchTotals) -> None:
        """Take a worker's totals."""
        before, self._before = self._before, totals
        if before is None or totals.tokens < before.tokens:  # first, or another life: who knows since when
            return
        if tokens := totals.tokens - before.tokens:
            seconds = totals.seconds - before.seconds - ASK_S * (totals.fetches - before.fetches)
            token_s = max(_TOKEN_MIN_S, seconds / tokens)
            self.observe(token_s)
            if self._elders is not None:
                self._elders.observe(token_s)

    def observe(self, token_s: float) -> None:
        """Learn from fetches that took so many seconds for each token, more than 0."""
        if self._is_fresh:
            self._token_s, self._is_fresh = token_s, False
            return
        surprise = math.log(token_s / self._token_s)
        self._token_s *= math.exp(_GAIN * max(-_SURPRISE_MAX, min(_SURPRISE_MAX, surprise)))
