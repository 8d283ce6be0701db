"""The router's door: a request is placed at once if there is room, waits its turn, or is refused. Pure: no I/O.

The service and the simulator run the same object.
"""

from collections.abc import Callable
from typing import NamedTuple

from cluster.router.admission import Admission, Forecast
from cluster.router.class_queue import Claim
from cluster.router.forecast import forecast
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.router import Router
from cluster.router.worker import Role
from cluster.service_level import ORDINARY, ServiceLevel
from common.config import RouterConfig
from common.errors import BatonError, OverloadedError

Answer = Callable[[Reservation | BatonError], None]
"""Called once, perhaps before `ask` returns."""


class Asked(NamedTuple):
    """A request, whose it is and what it may expect."""

    key: str
    """Unique among those not answered."""
    request: PlacementRequest
    tenant: str = ""
    level: ServiceLevel = ORDINARY
    timeout_s: float | None = None
    """What is left of its deadline."""
    is_admitted: bool = False
    """It was placed before, and its worker failed."""


class Front:
    """Owned by the router's loop; plain functions. Whoever changes what workers can take calls `pump` afterwards."""

    def __init__(self, router: Router, config: RouterConfig, on_queue: Callable[[], None] = lambda: None) -> None:
        """Begin empty.

        Args:
            router: places what is let in.
            config: bounds of the queue.
            on_queue: called when `next_end_s` may be nearer than it was.
        """
        self.router = router
        self._admission = Admission(config.queue_max, config.queue_patience_s, config.queue_wait_max_s)
        self.wait_max_s = config.queue_wait_max_s
        """Whoever waits is answered by then."""
        self._on_queue = on_queue
        self._waiting: dict[str, tuple[PlacementRequest, Answer]] = {}

    def ask(self, asked: Asked, answer: Answer) -> bool:
        """Place a request, now or later.

        Args:
            asked: what is asked.
            answer: gets the reservation, which must be released, or the error.

        Returns:
            Whether it waits: the answer comes later, unless it is withdrawn.
        """
        now = self.router.now()
        claim = self._claim(asked, now)
        try:
            outlook = self._forecast(asked.request, claim)
            if not self._waiting and self.router.has_room():
                self._admission.check(claim, now, outlook)
                answer(self.router.place(asked.request))
                return False
            shed = self._admission.join(claim, now, outlook)
        except BatonError as error:
            self._count_refusal(error)
            answer(error)
            return False
        self.router.counters["queued_total"] += 1
        self._waiting[asked.key] = (asked.request, answer)
        for victim in shed:
            self.router.counters["shed_total"] += 1
            self._refuse(victim, "made way for a request of a higher class or of a tenant that wants less", now)
        self._on_queue()
        return True

    def withdraw(self, key: str) -> bool:
        """Forget a request that waits; it gets no answer. False if it does not wait."""
        if self._waiting.pop(key, None) is None:
            return False
        self._admission.leave(key)
        return True

    def pump(self) -> None:
        """Place those whose turn it is, as long as there is room."""
        while self._waiting and self.router.has_room():
            claim = self._admission.take(self.router.now())
            request, answer = self._waiting.pop(claim.key)
            try:
                reservation = self.router.place(self._hurried(request, claim))
            except BatonError as error:
                answer(error)
            else:
                answer(reservation)

    def expire(self) -> None:
        """Refuse those whose deadline or longest wait is over."""
        now = self.router.now()
        for claim in self._admission.expired(now):
            self.router.counters["expired_total"] += 1
            self._refuse(claim, "waited for room until its deadline or the longest wait", now)
        self._on_queue()

    @property
    def next_end_s(self) -> float | None:
        """When `expire` must be called, by the router's clock; None: not at all."""
        return self._admission.next_end_s

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def check(self) -> None:
        """Assert that those that wait are those in the queue, and that the full are counted. For tests."""
        assert self.router.workers.fulls.count == sum(row.candidate.is_full for row in self.router.workers)
        assert {claim.key for claim in self._admission} == set(self._waiting)
        self.router.check()

    def _claim(self, asked: Asked, now: float) -> Claim:
        request = asked.request
        return Claim(
            key=asked.key,
            tenant=asked.tenant,
            level=asked.level,
            cost_tokens=request.num_tokens + round(self.router.expected_output(request)),
            deadline_s=None if asked.timeout_s is None else now + asked.timeout_s,
            is_admitted=asked.is_admitted,
            asked_s=now,
        )

    def _forecast(self, request: PlacementRequest, claim: Claim) -> Forecast | None:
        """Return what the request would meet when its turn comes; None when it does not matter."""
        level = claim.level
        if claim.is_admitted or (level.ttft_target_s is None and level.tpot_target_s is None):
            return None
        estimate = self.router.predict(request)
        own_s = max(1e-9, estimate.first.restore_s + estimate.first.compute_s)
        decoders = max(1, self.router.workers.num_ready(Role.DECODE, Role.BOTH))
        prefillers = self.router.workers.num_ready(Role.PREFILL) or decoders
        must_wait = bool(self._waiting) or not self.router.has_room()
        return forecast(
            estimate,
            self.router.expected_output(request),
            (self._admission.wait_s(claim, self.router.now()) or 0.0) if must_wait else 0.0,
            len(self._waiting) / decoders,
            level.tpot_target_s,
            claim.cost_tokens / own_s * prefillers,
        )

    def _hurried(self, request: PlacementRequest, claim: Claim) -> PlacementRequest:
        """Return the request with what its wait has left of its TTFT target."""
        if request.ttft_target_s is None:
            return request
        left_s = request.ttft_target_s - (self.router.now() - claim.asked_s)
        return request._replace(ttft_target_s=max(0.0, left_s))

    def _refuse(self, claim: Claim, why: str, now: float) -> None:
        _, answer = self._waiting.pop(claim.key)
        answer(OverloadedError(why, self._admission.retry_after_s(claim, now)))

    def _count_refusal(self, error: BatonError) -> None:
        if isinstance(error, OverloadedError):
            self.router.counters["refused_total"] += 1
