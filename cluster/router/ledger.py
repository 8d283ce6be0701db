"""The router's ledger: what is placed and has not ended, why it was placed so, and what its outcome teaches. Pure."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from cluster.router.backlog import Prompt
from cluster.router.estimate import PairEstimate
from cluster.router.expected_blocks import ExpectedBlocks
from cluster.router.explanations import Explanation, Explanations
from cluster.router.placement import Placement, PlacementRequest, Reservation, Size
from cluster.router.policies.policy import Choice
from cluster.router.question import Question
from cluster.router.silence import SilenceWatch
from cluster.router.traffic import Traffic
from cluster.router.worker import Worker, WorkerInfo
from common.clock import Clock


class Chosen(NamedTuple):
    """A policy's choice, and the rows that it means."""

    choice: Choice
    estimate: PairEstimate
    decode: Worker
    prefill: Worker | None
    holder: WorkerInfo | None
    """Who pushes the prompt's beginning to the worker that prefills."""


class Ledger:
    """Reservations by which workers' accounts go up and down; told of each one's outcome. Owned by the router."""

    def __init__(self, clock: Clock, counters: Counter[str], has_announced: Callable[[str], bool]) -> None:
        """Begin empty.

        Args:
            clock: of placements.
            counters: the router's.
            has_announced: whether a worker has said that it holds anything.
        """
        self.expected = ExpectedBlocks()
        self.explanations = Explanations()
        self.traffic = Traffic()
        self._reservations: dict[Reservation, Explanation | None] = {}
        self._silence = SilenceWatch()
        self._clock = clock
        self._counters = counters
        self._has_announced = has_announced

    def __len__(self) -> int:
        """Return how many requests are placed or held, and have not ended."""
        return len(self._reservations)

    def reserve(self, request: PlacementRequest, question: Question, chosen: Chosen) -> Reservation:
        """Enter a placement, which takes its part of the workers until it is released."""
        first, decode, prefill = chosen.estimate.first, chosen.decode, chosen.prefill
        decode_hit = question.hits.of(decode.info.worker_id)
        prefill_hit = 0 if prefill is None else question.hits.of(prefill.info.worker_id)
        placement = Placement(
            decode.info,
            None if prefill is None else prefill.info,
            decode_hit,
            prefill_hit,
            chosen.choice.reason,
            first.ttft_s,
            chosen.holder,
            first.fetched_blocks,
        )
        size = Size(
            Prompt(request.num_tokens, request.num_tokens - first.num_cached, first.bring_s + first.compute_s),
            output_tokens=request.max_output_tokens,
            sent_tokens=0 if prefill is None else max(0, request.num_tokens - decode_hit * question.block_tokens),
            blocks=len(request.hashes),
        )
        reservation = Reservation(self, placement, decode, prefill, size)
        prefiller = prefill or decode
        self.expected.add(reservation, prefiller.info.worker_id, request.hashes, reservation.placed_at)
        self.traffic.placed(question.num_blocks, prefill_hit if prefill is not None else decode_hit)
        self._reservations[reservation] = self._explain(request, question, chosen)
        return reservation

    def hold(self, decode: Worker, prefill: Worker | None, num_tokens: int, max_output_tokens: int) -> Reservation:
        """Enter a request that was placed before this router started."""
        prefill_s = (prefill or decode).candidate.prefill_s(num_tokens, 0)
        size = Size(Prompt(num_tokens, num_tokens, prefill_s), max_output_tokens)
        reservation = Reservation(self, None, decode, prefill, size)
        self._reservations[reservation] = None
        return reservation

    def forget(self, worker_id: str) -> None:
        """A worker left."""
        self.expected.forget(worker_id)
        self._silence.forget(worker_id)

    def is_silent(self, worker_id: str) -> bool:
        """Whether a worker must have cached blocks and has announced none."""
        return self._silence.is_silent(worker_id)

    # What reservations tell.

    def now(self) -> float:
        """Return the time, seconds."""
        return self._clock.now()

    def prefilled(self, reservation: Reservation, is_success: bool) -> None:
        """Take note that a reservation's prefill is over."""
        if not is_success:
            self.expected.drop(reservation)
            return
        self.expected.settle(reservation)
        if (explanation := self._reservations.get(reservation)) is not None:
            explanation.observed_ttft_s = observed_s = self.now() - reservation.placed_at
            self.traffic.waited(explanation.predicted_wait_s, observed_s - explanation.predicted_busy_s)

    def released(self, reservation: Reservation, num_blocks: int) -> None:
        """Forget a reservation, whose end left `num_blocks` cached."""
        self._reservations.pop(reservation, None)
        placement = reservation.placement
        if placement is not None and num_blocks:
            worker_id = (placement.prefill or placement.decode).worker_id
            self._counters["silent_cache"] += self._silence.ended(worker_id, self._has_announced(worker_id))

    # Inside.

    def _explain(self, request: PlacementRequest, question: Question, chosen: Chosen) -> Explanation:
        first = chosen.estimate.first
        explanation = Explanation(
            request.request_id,
            chosen.choice.reason,
            chosen.decode.info.worker_id,
            None if chosen.prefill is None else chosen.prefill.info.worker_id,
            chosen.choice.considered or (chosen.estimate,),
            first.ttft_s,
            first.wait_s / question.outlook.wait_factor,
            first.ttft_s - first.wait_s,
            request.tenant,
        )
        self.explanations.add(explanation)
        return explanation
