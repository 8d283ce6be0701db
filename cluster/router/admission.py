"""Who is let in, in which order, and who is refused, when there is not room for all. Pure: no clock, no I/O.

It keeps the one queue of the cluster: workers are given little more than they can do at once (see front.py), so that
the order decided here is the order in which requests are served.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from cluster.router.class_queue import Claim, ClassQueue, Entry
from cluster.router.drain_rate import DrainRate
from cluster.router.rotation import Turn
from cluster.service_level import Priority
from common.errors import OverloadedError

SHARES = {Priority.HIGH: 1.0, Priority.NORMAL: 1 / 4, Priority.LOW: 1 / 16}
"""Tokens that a class is served for each token of the classes above it, while both wait: the lowest does not starve."""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 120.0
_RETRY_UNKNOWN_S = 1.0
_STALE_MAX = 256


class Forecast(NamedTuple):
    """What a request would see if it began now; seconds."""

    ttft_s: float
    tpot_s: float
    """With the decode load that is expected when its prefill ends."""
    relief_s: float
    """Until the decode load has fallen enough for its TPOT target, as far as can be said."""
    tokens_per_s: float
    """Of waiting requests that the cluster takes up, as long as that was not measured."""


class Admission:
    """The queue of those that wait for room. Owned by the router's loop; plain functions.

        join ──► waiting ──take──► (placed)
          │         ├──leave, expire──► (gone)
          └─refused └──pushed out by a higher class, or by a tenant that wants less──► (shed)

    Order: the highest class that waits, but for the shares of those below it; in a class the tenants by deficit round
    robin on tokens; of each tenant the request that is due first. Due is the arrival plus the least of target, deadline
    and `patience_s`: who has waited for `patience_s` is not overtaken by later requests of its tenant. So nothing
    starves, whatever arrives.
    """

    def __init__(self, queue_max: int, patience_s: float, wait_max_s: float) -> None:
        """Begin empty.

        Args:
            queue_max: most requests that wait.
            patience_s: longest head start that a target or deadline gives over an earlier request without.
            wait_max_s: nobody waits longer; who would have to is refused.
        """
        self._queue_max = queue_max
        self._patience_s = patience_s
        self._wait_max_s = wait_max_s
        self._classes = {priority: ClassQueue() for priority in Priority}
        self._credit = dict.fromkeys(Priority, 0.0)
        """Tokens of its share that a class was not served yet."""
        self._returning: deque[Entry] = deque()
        self._entries: dict[str, Entry] = {}
        self._ends: list[tuple[float, int, str]] = []  # a heap; some are of requests that are gone
        self._arrivals = 0
        self._rate = DrainRate()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Claim]:
        return (entry.claim for entry in self._entries.values())

    def join(self, claim: Claim, now_s: float, forecast: Forecast | None) -> list[Claim]:
        """Let a request wait.

        Args:
            claim: see Claim; its key must not wait already.
            now_s: on the caller's clock.
            forecast: for the moment when its turn comes; None: nothing is known.

        Returns:
            Those that were shed for it; each of them is to be refused with `retry_after_s`.

        Raises:
            OverloadedError: it is refused, and nothing has changed: no room, or its targets cannot be met.
        """
        assert claim.key not in self._entries
        self._arrivals += 1
        if claim.is_admitted:
            self._enter(Entry(now_s, self._arrivals, claim, now_s))
            return []
        entry = Entry(self._due_s(claim, now_s), self._arrivals, claim, now_s)
        self._check(claim, now_s, self._wait_s(claim, now_s, forecast), forecast)
        shed = [] if len(self._entries) < self._queue_max else [self._victim(entry)]
        for claim_out in shed:
            self.leave(claim_out.key)
        self._enter(entry)
        return shed

    def check(self, claim: Claim, now_s: float, forecast: Forecast | None) -> None:
        """Refuse early what could not be served in time although it need not wait.

        Raises:
            OverloadedError: with the time after which it could.
        """
        if not claim.is_admitted:
            self._check(claim, now_s, 0.0, forecast)

    def _check(self, claim: Claim, now_s: float, wait_s: float, forecast: Forecast | None) -> None:
        if wait_s > self._wait_max_s:
            raise _refusal(
                f"it would wait {wait_s:.1f} s, the most is {self._wait_max_s:g} s", wait_s - self._wait_max_s
            )
        if claim.deadline_s is not None and now_s + wait_s + (forecast.ttft_s if forecast else 0.0) > claim.deadline_s:
            raise _refusal(f"it would wait {wait_s:.1f} s, its deadline is nearer", wait_s)
        if forecast is None:
            return
        level, ttft_s = claim.level, wait_s + forecast.ttft_s
        if level.ttft_target_s is not None and ttft_s > level.ttft_target_s:
            late_s = ttft_s - level.ttft_target_s
            raise _refusal(f"the first token would come after {ttft_s:.2f} s, asked {level.ttft_target_s:g} s", late_s)
        if level.tpot_target_s is not None and forecast.tpot_s > level.tpot_target_s:
            raise _refusal(
                f"a token would take {forecast.tpot_s:.3f} s, asked {level.tpot_target_s:g} s", forecast.relief_s
            )

    def head(self) -> Claim | None:
        """Return whose turn it is; None when nobody waits."""
        if self._returning:
            return self._returning[0].claim
        return self._next()[2].claim if self._entries else None

    def take(self, now_s: float) -> Claim:
        """Take the one whose turn it is out of the queue, charged to its class and tenant."""
        if self._returning:
            entry = self._returning.popleft()
            del self._entries[entry.claim.key]
            return entry.claim
        priority, turn, entry = self._next()
        cost = entry.claim.cost_tokens
        self._classes[priority].rotation.serve(turn, cost)
        self._credit[priority] = max(0.0, self._credit[priority] - cost)
        for other, group in self._classes.items():
            if other > priority and group:
                self._credit[other] += cost * SHARES[other]
        self._rate.took(cost, now_s, is_busy=len(self._entries) > 1)
        self.leave(entry.claim.key)
        return entry.claim

    def leave(self, key: str) -> Claim | None:
        """Take a request out; None if it does not wait."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        if entry.claim.is_admitted:
            self._returning.remove(entry)
            return entry.claim
        priority = entry.claim.level.priority
        self._classes[priority].remove(entry)
        if not self._classes[priority]:
            self._credit[priority] = 0.0
        return entry.claim

    def expired(self, now_s: float) -> list[Claim]:
        """Take out those whose deadline or longest wait is over, and return them."""
        gone = []
        while (end_s := self.next_end_s) is not None and end_s <= now_s:
            gone.append(self.leave(self._ends[0][2]))
        return [claim for claim in gone if claim is not None]

    @property
    def next_end_s(self) -> float | None:
        """When `expired` will return somebody; None: never."""
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def wait_s(self, claim: Claim, now_s: float) -> float | None:
        """Return how long a request that joins now would wait for its turn; None when that cannot be said.

        There is no room for it, so before its turn as much is taken up as is before it, and it needs itself.
        """
        return self._rate.seconds_for(self._cost_before(claim, now_s) + claim.cost_tokens)

    def retry_after_s(self, claim: Claim, now_s: float) -> float:
        """Return when a request that was refused or shed would find what is now before it gone."""
        wait_s = self.wait_s(claim, now_s)
        return _RETRY_UNKNOWN_S if wait_s is None else _clamped(wait_s)

    def _wait_s(self, claim: Claim, now_s: float, forecast: Forecast | None) -> float:
        wait_s = self.wait_s(claim, now_s)
        if wait_s is None:
            cost = self._cost_before(claim, now_s) + claim.cost_tokens
            wait_s = 0.0 if forecast is None else cost / forecast.tokens_per_s
        return wait_s

    # Inside.

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.claim.key] = entry
        if len(self._ends) > 2 * len(self._entries) + _STALE_MAX:
            self._ends = [end for end in self._ends if self._is_current(end)]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (self._end_s(entry), entry.number, entry.claim.key))
        if entry.claim.is_admitted:
            self._returning.append(entry)
            return
        self._classes[entry.claim.level.priority].add(entry)

    def _next(self) -> tuple[Priority, Turn, Entry]:
        """Return the highest class that waits and its next, or that of a lower one whose share has paid for it."""
        highest = next(priority for priority in Priority if self._classes[priority])
        for priority in reversed(Priority):
            if priority > highest and self._classes[priority]:
                turn, entry = self._classes[priority].next()
                if entry.claim.cost_tokens <= self._credit[priority]:
                    return priority, turn, entry
        return highest, *self._classes[highest].next()

    def _due_s(self, claim: Claim, now_s: float) -> float:
        slack = self._patience_s
        if claim.level.ttft_target_s is not None:
            slack = min(slack, claim.level.ttft_target_s)
        if claim.deadline_s is not None:
            slack = min(slack, max(0.0, claim.deadline_s - now_s))
        return now_s + slack

    def _end_s(self, entry: Entry) -> float:
        end_s = entry.joined_s + self._wait_max_s
        return end_s if entry.claim.deadline_s is None else min(end_s, entry.claim.deadline_s)

    def _is_current(self, end: tuple[float, int, str]) -> bool:
        entry = self._entries.get(end[2])
        return entry is not None and entry.number == end[1]

    def _victim(self, entry: Entry) -> Claim:
        """Return whom to shed for a newcomer: somebody of a lower class, or of its own whose tenant wants more."""
        claim = entry.claim
        lowest = next((priority for priority in reversed(Priority) if self._classes[priority]), None)
        if lowest is not None and lowest >= claim.level.priority:
            group = self._classes[lowest]
            last = group.last().claim
            wanted = group.cost_of(claim.tenant) + claim.cost_tokens
            if lowest > claim.level.priority or group.cost_of(last.tenant) > wanted:
                return last
        message = f"{len(self._entries)} requests wait, the most that may"
        raise OverloadedError(message, self.retry_after_s(claim, entry.joined_s))

    def _cost_before(self, claim: Claim, now_s: float) -> float:
        """Return about how many tokens are served before a request that joins now."""
        own = claim.level.priority
        returning = sum(entry.claim.cost_tokens for entry in self._returning)
        before = float(self._classes[own].cost_before(claim.tenant, self._due_s(claim, now_s)))
        higher = float(sum(group.cost_tokens for priority, group in self._classes.items() if priority < own))
        # By its share, a class is served although higher ones wait; and while it is, lower ones get theirs.
        before += min(higher, (before + claim.cost_tokens) / SHARES[own])
        lower = [(priority, group) for priority, group in self._classes.items() if priority > own]
        return returning + before + sum(min(group.cost_tokens, before * SHARES[priority]) for priority, group in lower)


def _refusal(message: str, retry_after_s: float) -> OverloadedError:
    return OverloadedError(message, _clamped(retry_after_s))


def _clamped(seconds: float) -> float:
    return min(RETRY_MAX_S, max(RETRY_MIN_S, seconds))
