"""What it takes to have KV pushed by another worker, learned from each worker's own reports."""

from typing import NamedTuple

from cluster.router.token_time import TokenTime

ASK_S = 5e-3
"""Of a fetch, whatever is fetched: the holder is asked, and reads the question."""
STARTING_TOKEN_S = 1e-5
"""Of each token, before anything was fetched. Too little is put right by the first fetch; with too much nothing is ever
fetched."""


class FetchTotals(NamedTuple):
    """What a worker has fetched since it started. Differences of two of them are observations."""

    fetches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """From the asking until all was there, added up."""
    failed_tokens: int = 0
    """Wanted by fetches that failed, ran out of time or were given up."""
    failed_seconds: float = 0.0
    """Until then."""


class FetchLearner:
    """Learns what a fetched token takes to arrive at one worker from the totals that it reports."""

    def __init__(self, elders: TokenTime | None = None) -> None:
        """Begin.

        Args:
            elders: what the fetches of all workers have shown; None: this one goes by its own.
        """
        self.time = TokenTime(STARTING_TOKEN_S, elders)
        """Of each token, beside ASK_S."""
        self._before: FetchTotals | None = None

    def report(self, totals: FetchTotals, now: float) -> None:
        """Take a worker's totals."""
        before, self._before = self._before, totals
        if before is None or totals == before:  # of the first one nobody knows since when
            return
        if totals.tokens < before.tokens or totals.failed_tokens < before.failed_tokens:  # another life
            return
        if tokens := totals.tokens - before.tokens:
            asked_s = ASK_S * (totals.fetches - before.fetches)
            self.time.came(tokens, totals.seconds - before.seconds - asked_s, now)
        if tokens := totals.failed_tokens - before.failed_tokens:
            self.time.failed(tokens, totals.failed_seconds - before.failed_seconds, now)
