"""Requests of one priority class that wait: tenants in turn by tokens, of each tenant the one that is due first."""

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from cluster.router.rotation import Rotation, Turn
from cluster.service_level import ServiceLevel

QUANTUM_TOKENS = 2048.0
"""Granted to a tenant at each visit. Smaller is fairer, larger keeps a tenant's requests together."""


class Claim(NamedTuple):
    """What the admission must know of a request."""

    key: str
    """Unique among those that wait."""
    tenant: str
    level: ServiceLevel
    cost_tokens: int
    """Prompt to prefill and output to expect: what tenants share fairly."""
    deadline_s: float | None = None
    """On the caller's clock."""
    is_admitted: bool = False
    """It was let in before and lost its worker: it goes first and is never refused here."""
    asked_s: float = 0.0
    """When it came, on the caller's clock."""


class Entry(NamedTuple):
    """A claim in the queue. Ordered by when it is due, then by arrival."""

    due_s: float
    number: int
    """Of its arrival: no two are alike."""
    claim: Claim
    joined_s: float


class ClassQueue:
    """Owned by the admission; plain functions."""

    def __init__(self) -> None:
        self.rotation = Rotation(lambda _: QUANTUM_TOKENS)
        self.cost_tokens = 0
        """Of all that wait."""
        self._tenants: dict[str, list[Entry]] = {}
        self._costs: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, entry: Entry) -> None:
        """Let a request wait."""
        tenant, cost = entry.claim.tenant, entry.claim.cost_tokens
        insort(self._tenants.setdefault(tenant, []), entry)
        self._costs[tenant] = self._costs.get(tenant, 0) + cost
        self.cost_tokens += cost
        self.rotation.add(tenant)

    def remove(self, entry: Entry) -> None:
        """Take out a request that waits."""
        tenant, cost = entry.claim.tenant, entry.claim.cost_tokens
        entries = self._tenants[tenant]
        del entries[bisect_left(entries, entry)]
        self._costs[tenant] -= cost
        self.cost_tokens -= cost
        if not entries:
            del self._tenants[tenant], self._costs[tenant]
            self.rotation.remove(tenant)

    def next(self) -> tuple[Turn, Entry]:
        """Return whose turn it is, with the tenant's turn; somebody must wait."""
        turn = self.rotation.next(lambda tenant: self._tenants[tenant][0].claim.cost_tokens)
        return turn, self._tenants[turn.name][0]

    def last(self) -> Entry:
        """Return whom to shed: of the tenant that wants most, the request that would be served last."""
        dearest = max(self._costs, key=lambda tenant: (self._costs[tenant], tenant))
        return self._tenants[dearest][-1]

    def cost_of(self, tenant: str) -> int:
        """Return the tokens that a tenant waits for."""
        return self._costs.get(tenant, 0)

    def cost_before(self, tenant: str, due_s: float) -> float:
        """Return about how many tokens are served before a request of `tenant` that is due then."""
        entries = self._tenants.get(tenant, ())
        before = bisect_right(entries, due_s, key=_due_s)
        own = self._costs[tenant] * before / len(entries) if entries else 0.0
        share = own + QUANTUM_TOKENS
        return own + sum(min(cost, share) for other, cost in self._costs.items() if other != tenant)


def _due_s(entry: Entry) -> float:
    return entry.due_s
