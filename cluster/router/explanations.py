"""Why the last requests were placed as they were. Bounded: the oldest are forgotten."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.router.estimate import PairEstimate


@dataclass(slots=True, eq=False)
class Explanation:
    """One placement."""

    request_id: str
    reason: str
    decode_worker_id: str
    prefill_worker_id: str | None
    considered: Collection[PairEstimate]
    """What was weighed; by a policy that does not reckon in seconds, the estimate of what it chose."""
    predicted_ttft_s: float
    """From the placement on."""
    predicted_wait_s: float
    """Of this: what was ahead of it then."""
    predicted_busy_s: float
    """And its own prefill."""
    tenant: str = ""
    """Whose request it was."""
    observed_ttft_s: float | None = None
    """Likewise; None: no token yet."""


class Explanations:
    """Owned by the router's loop; plain functions."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._ring: deque[Explanation] = deque()
        self._by_request: dict[str, list[Explanation]] = {}

    def add(self, explanation: Explanation) -> None:
        """Remember one, and forget the oldest beyond the limit."""
        if len(self._ring) == self._limit:
            oldest = self._ring.popleft()
            others = self._by_request[oldest.request_id]
            others.remove(oldest)
            if not others:
                del self._by_request[oldest.request_id]
        self._ring.append(explanation)
        self._by_request.setdefault(explanation.request_id, []).append(explanation)

    def of(self, request_id: str, tenant: str | None = None) -> Sequence[Explanation]:
        """Return a request's placements, the first one first; more than one if a worker failed it.

        Args:
            request_id: the client's: several requests may have it.
            tenant: whose requests are meant; None: everybody's.
        """
        found = self._by_request.get(request_id, ())
        return tuple(each for each in found if tenant is None or each.tenant == tenant)

    def latest(self, count: int) -> Sequence[Explanation]:
        """Return the last placements, the latest last."""
        return list(self._ring)[-count:] if count else []
