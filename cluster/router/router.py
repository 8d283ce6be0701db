"""The router's core: place a request, remember it until it ends. Pure: no I/O, no Ray, time from a clock.

The service, the tests and the simulator run the same object.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random

from cluster.router.agreement import Agreement
from cluster.router.eligible import DECODERS, eligible_decoders, eligible_prefillers, without_fallback
from cluster.router.estimate import PairEstimate, estimate_pair
from cluster.router.hits import Hits
from cluster.router.hot_prefixes import Hot, HotPrefixes
from cluster.router.ledger import Chosen, Ledger
from cluster.router.local_prefills import LocalPrefills
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.policy import Choice, Policy
from cluster.router.prefix_index import PrefixIndex
from cluster.router.question import Candidate, Question
from cluster.router.room import AHEAD_S, has_room, those_with_room
from cluster.router.step_model import STARTING, StepModel
from cluster.router.weighing import weigh
from cluster.router.worker import Account, Role, State, Worker, WorkerFacts, WorkerInfo, WorkerLoad
from cluster.router.worker_table import WorkerTable
from common.clock import Clock, MonotonicClock
from common.errors import MismatchError

_HOLDERS_MAX = 32
"""Holders of a prefix among whom the one that pushes it is chosen."""


class Router:
    """Workers, prefixes and placements of one cluster. Owned by one loop; plain functions."""

    def __init__(
        self,
        policy: Policy,
        rng: Random,
        clock: Clock | None = None,
        ahead_s: float = AHEAD_S,
        *,
        step: StepModel = STARTING,
        falls_back: bool = True,
    ) -> None:
        """Begin without workers.

        Args:
            policy: chooses.
            rng: all chance.
            clock: for predictions of the time to wait; None: the machine's.
            ahead_s: prefill that a worker is given ahead before it is full.
            step: what workers' steps take, to begin with.
            falls_back: whether decode workers prefill when no prefill worker can; else WorkerLostError.
        """
        self.policy = policy
        self.workers = WorkerTable(ahead_s, step)
        self.index = PrefixIndex()
        self.hot_prefixes = HotPrefixes()
        self.counters: Counter[str] = Counter()
        self.placements_total = 0
        self._rng = rng
        self._clock = clock or MonotonicClock()
        self._agreement = Agreement()
        self._ledger = Ledger(self._clock, self.counters, lambda worker_id: self.index.holds_any(worker_id))
        self.expected = self._ledger.expected
        self.explanations = self._ledger.explanations
        self._local_prefills = LocalPrefills(self.workers, self.counters)
        self._falls_back = falls_back

    # What gateways ask for.

    def place(self, request: PlacementRequest) -> Reservation:
        """Choose workers for a request and reserve its part of them.

        Raises:
            WorkerLostError: nobody can decode now, or prefill without a fallback; nothing was reserved.
            InvalidRequestError: no worker's pool could ever hold the prompt.
        """
        question = self._question(request, self.hot_prefixes.use)
        choice = self.policy.choose(question, self._rng)
        # A policy that does not reckon in seconds cannot know that a fetch is worth its time.
        estimate = choice.estimate or estimate_pair(question._replace(deepest=None), choice.decode, choice.prefill)
        if choice.prefill is not None:
            self._local_prefills.apart()
        elif not choice.decode.prefills_itself:
            self._local_prefills.local(request.request_id, was_forced=not len(question.prefill))
        self.placements_total += 1
        return self._ledger.reserve(request, question, self._chosen(question, choice, estimate))

    def predict(self, request: PlacementRequest) -> PairEstimate:
        """Return what a request would meet at best if it were placed now without harm; nothing is reserved.

        It is not the policy that is asked, since to some that would be a placement.

        Raises:
            WorkerLostError: as `place`.
            InvalidRequestError: as `place`.
        """
        question = self._question(request, self.hot_prefixes.look)
        return weigh(question, self._rng).harmless().least()

    def has_room(self) -> bool:
        """Whether a request that is placed now goes to workers that are not full. True also when there are none."""
        return not self.workers.fulls.count or has_room(
            self.workers.ready(*DECODERS).candidates, self.workers.ready(Role.PREFILL).candidates
        )

    def expected_output(self, request: PlacementRequest) -> float:
        """Return how many tokens its answer will have, by those of late."""
        return min(float(request.max_output_tokens), self._ledger.traffic.output_tokens)

    def hold(
        self,
        decode_worker_id: str,
        prefill_worker_id: str | None,
        num_tokens: int,
        max_output_tokens: int,
        is_prefilled: bool,
    ) -> Reservation:
        """Count a running request again that was placed before this router started. Unknown workers are all right."""
        decode = self._row_or_stranger(decode_worker_id)
        prefill = None if prefill_worker_id is None else self._row_or_stranger(prefill_worker_id)
        reservation = self._ledger.hold(decode, prefill, num_tokens, max_output_tokens)
        if is_prefilled:
            reservation.first_token()
        self.counters["holds_total"] += 1
        return reservation

    def finished(self, output_tokens: int) -> None:
        """Learn how long an answer was."""
        self._ledger.traffic.finished(output_tokens)

    def is_silent(self, worker_id: str) -> bool:
        """Whether a worker must have cached blocks and has announced none."""
        return self._ledger.is_silent(worker_id)

    def now(self) -> float:
        """Return the time, seconds."""
        return self._clock.now()

    @property
    def num_reservations(self) -> int:
        """Requests placed or held, and not ended."""
        return len(self._ledger)

    # What the watchers of the workers tell.

    def set_workers(
        self, infos: Iterable[WorkerInfo], absent: Iterable[WorkerInfo] = ()
    ) -> tuple[list[WorkerInfo], list[str]]:
        """Take the list of workers that exist now; see WorkerTable.replace."""
        new, left = self.workers.replace(infos, absent)
        for worker_id in left:
            self.index.forget(worker_id)
            self._ledger.forget(worker_id)
        self._agreement.forget_if_alone(self.workers)
        return new, left

    def welcome(self, worker_id: str, facts: WorkerFacts) -> None:
        """Compare a worker's handshake with what the others agree on. It is ready after its first report.

        Raises:
            MismatchError: the worker cannot be part of this cluster; it is in state `refused`.
        """
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        worker.greet(facts)
        self.workers.move(worker, State.STARTING)
        self._agreement.forget_if_alone(self.workers)
        try:
            self._agreement.check(facts)
        except MismatchError as error:
            self.workers.move(worker, State.REFUSED, error.message)
            raise

    def report(self, worker_id: str, load: WorkerLoad) -> None:
        """Take a load report."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.facts is None or worker.state is State.REFUSED:
            return
        worker.take_report(load, self.now())
        self.expected.reported(worker_id)
        state = State.DRAINING if load.is_draining else State.READY
        if worker.state is not state:
            self.workers.move(worker, state, "asked to drain" if load.is_draining else "")
        self._agreement.join(worker.facts)

    def refuse(self, worker_id: str, reason: str) -> None:
        """A worker is not what it should be."""
        self._take_out(worker_id, State.REFUSED, reason)

    def lose(self, worker_id: str, reason: str) -> None:
        """A worker is gone: nothing is placed there any more, and its prefixes vanish."""
        if self._take_out(worker_id, State.LOST, reason):
            self.counters["workers_lost_total"] += 1

    def agreed(self) -> WorkerFacts | None:
        """Return what the ready workers agree on, with the smallest window among them; None while there are none."""
        return self._agreement.facts

    @property
    def context_tokens(self) -> int:
        """The smallest window among the ready workers; 0: none."""
        return min(
            (row.facts.context_tokens for row in self.workers if row.facts and row.state is State.READY), default=0
        )

    def check(self) -> None:
        """Assert that the accounts are the sum of the reservations. For tests."""
        for worker in self.workers:
            account = worker.account
            assert account.reservations >= 0
            assert account.queued_tokens >= 0
            assert account.num_tokens >= 0
            if not len(self._ledger):
                assert account == Account(), f"{worker.info.worker_id} keeps {account} without a reservation"
                assert len(worker.candidate.backlog) == 0
                assert worker.candidate.backlog.total_s == 0

    # Inside.

    def _question(self, request: PlacementRequest, heat: Callable[[Sequence[bytes], Hits, float], Hot]) -> Question:
        decode, prefill = eligible_decoders(self.workers, request), eligible_prefillers(self.workers, request)
        if not self._falls_back:
            decode = without_fallback(self.workers, decode, prefill)
        if self.workers.fulls.count:
            decode, prefill = those_with_room(decode, prefill)
        now = self.now()
        hits = self.index.find(request.hashes)
        deepest = hits.in_pool[-1] if hits.in_pool else None
        if expected := self.expected.find(request.hashes, now):
            hits = hits.raised(expected)
        return Question(
            num_tokens=request.num_tokens,
            num_blocks=len(request.hashes),
            decode=decode,
            prefill=prefill,
            hits=hits,
            deepest=deepest,
            hot=heat(request.hashes, hits, now),
            block_tokens=self._agreement.block_tokens,
            max_output_tokens=request.max_output_tokens,
            ttft_target_s=request.ttft_target_s,
            tpot_target_s=request.tpot_target_s,
            outlook=self._ledger.traffic.outlook(now),
        )

    def _row(self, candidate: Candidate) -> Worker:
        worker = self.workers.get(candidate.worker_id)
        assert worker is not None
        return worker

    def _row_or_stranger(self, worker_id: str) -> Worker:
        """Return a row, or for an unknown worker one of its own that nobody else will see."""
        return self.workers.get(worker_id) or Worker(WorkerInfo(worker_id, "", Role.DECODE))

    def _chosen(self, question: Question, choice: Choice, estimate: PairEstimate) -> Chosen:
        decode = self._row(choice.decode)
        prefill = None if choice.prefill is None else self._row(choice.prefill)
        holder = None
        if estimate.first.fetched_blocks:
            holder = self._holder(question)
            (prefill or decode).begin_fetch(self.now())
        return Chosen(choice, estimate, decode, prefill, holder)

    def _holder(self, question: Question) -> WorkerInfo | None:
        """Return the least busy of those that hold most of the prompt, of many of some of them."""
        assert question.deepest is not None
        hits = question.hits
        holders = hits.those_of(question.deepest.holders, self.workers.rows, _HOLDERS_MAX, self._rng.choice(hits.names))
        return min(holders, key=lambda worker: worker.candidate.num_sequences).info

    def _take_out(self, worker_id: str, state: State, reason: str) -> bool:
        worker = self.workers.get(worker_id)
        if worker is None:
            return False
        was = worker.state
        self.workers.move(worker, state, reason)
        worker.forget_report()
        self.index.forget(worker_id)
        self.expected.forget(worker_id)
        self._agreement.forget_if_alone(self.workers)
        return was is not state
