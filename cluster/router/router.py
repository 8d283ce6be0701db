"""The router's core: place a request, remember it until it ends. Pure: no clock, no I/O, no Ray.

The service, the tests and the simulator run the same object.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from cluster.router.policies.policy import Candidate, Policy, Question
from cluster.router.prefix_index import PrefixIndex
from cluster.router.worker_table import Account, Role, State, Worker, WorkerFacts, WorkerInfo, WorkerLoad, WorkerTable
from common.errors import InvalidRequestError, MismatchError, WorkerLostError
from common.logs import log

_LOG = logging.getLogger(__name__)
_DECODERS = (Role.DECODE, Role.BOTH)
RETRY_AFTER_S = 1.0
"""A worker that died is replaced, or noticed to live, in about this time at best."""
_SILENT_ENDS = 16
"""Ended requests with at least one full block after which a worker that still has announced none is suspicious."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What the router must know of a request."""

    request_id: str
    num_tokens: int
    """Of the prompt, and of output that exists already."""
    max_output_tokens: int
    hashes: Sequence[bytes] = ()
    """Chain hashes of the full blocks, in order."""
    excluded: frozenset[str] = frozenset()
    """Workers that failed this request already."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes."""

    decode: WorkerInfo
    prefill: WorkerInfo | None
    """None: the decode worker prefills."""
    decode_hit_blocks: int
    prefill_hit_blocks: int
    reason: str


class Reservation:
    """What one request occupies, on one decode and perhaps one prefill worker. `release` gives it back, once."""

    def __init__(
        self, router: "Router", placement: Placement | None, decode: Worker, prefill: Worker | None, tokens: "_Tokens"
    ) -> None:
        self.placement = placement
        """None for a reservation that `Router.hold` counted again."""
        self._router = router
        self._decode = decode
        self._prefill = prefill
        self._tokens = tokens
        self._is_prefilled = False
        self._is_released = False
        decode.book(reservations=1, num_tokens=tokens.held)
        self._prefiller.book(reservations=prefill is not None, queued_tokens=tokens.queued)

    @property
    def _prefiller(self) -> Worker:
        return self._decode if self._prefill is None else self._prefill

    def first_token(self) -> None:
        """The prefill part is over. Further calls do nothing."""
        if self._is_prefilled:
            return
        self._is_prefilled = True
        self._prefiller.book(reservations=-(self._prefill is not None), queued_tokens=-self._tokens.queued)

    def release(self) -> None:
        """The request is over, whatever its outcome. Further calls do nothing."""
        if self._is_released:
            return
        self._is_released = True
        was_prefilled = self._is_prefilled
        self.first_token()
        self._decode.book(reservations=-1, num_tokens=-self._tokens.held)
        self._router.released(self, self._tokens.blocks if was_prefilled else 0)


@dataclass(frozen=True, slots=True)
class _Tokens:
    queued: int
    held: int
    blocks: int = 0
    """Full blocks of the prompt, which somebody must have cached at the end."""


class Router:
    """Workers, prefixes and placements of one cluster. Owned by one loop; plain functions."""

    def __init__(self, policy: Policy, rng: Random) -> None:
        self.policy = policy
        self.workers = WorkerTable()
        self.index = PrefixIndex()
        self.counters: Counter[str] = Counter()
        self.placements_total = 0
        self._rng = rng
        self._reservations: set[Reservation] = set()
        self._agreed: WorkerFacts | None = None
        self._silent: Counter[str] = Counter()
        self._has_fallen_back = False

    # What gateways ask for.

    def place(self, request: PlacementRequest) -> Reservation:
        """Choose workers for a request and reserve its part of them.

        Raises:
            WorkerLostError: nobody can decode now; nothing was reserved.
            InvalidRequestError: no worker's pool could ever hold the prompt.
        """
        question = Question(
            num_tokens=request.num_tokens,
            num_blocks=len(request.hashes),
            decode=self._decoders(request),
            prefill=self._prefillers(request),
            hits=self.index.find(request.hashes),
        )
        choice = self.policy.choose(question, self._rng)
        if choice.prefill is not None:
            self._has_fallen_back = False
        elif not choice.decode.prefills_itself:
            self._count_fallback(request)
        decode = self._row(choice.decode)
        prefill = None if choice.prefill is None else self._row(choice.prefill)
        placement = Placement(
            decode.info,
            None if prefill is None else prefill.info,
            question.hits.of(choice.decode.worker_id),
            0 if choice.prefill is None else question.hits.of(choice.prefill.worker_id),
            choice.reason,
        )
        self.placements_total += 1
        return self._reserve(placement, decode, prefill, request)

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
        reservation = Reservation(self, None, decode, prefill, _Tokens(num_tokens, num_tokens + max_output_tokens))
        if is_prefilled:
            reservation.first_token()
        self._reservations.add(reservation)
        self.counters["holds_total"] += 1
        return reservation

    def released(self, reservation: Reservation, num_blocks: int) -> None:
        """Forget a reservation, whose end left `num_blocks` cached; it calls this itself."""
        self._reservations.discard(reservation)
        placement = reservation.placement
        if placement is not None and num_blocks:
            self._watch_silence((placement.prefill or placement.decode).worker_id)

    @property
    def num_reservations(self) -> int:
        """Requests placed or held, and not ended."""
        return len(self._reservations)

    # What the watchers of the workers tell.

    def set_workers(self, infos: Iterable[WorkerInfo]) -> tuple[list[WorkerInfo], list[str]]:
        """Take the list of workers that exist now; see WorkerTable.replace."""
        new, left = self.workers.replace(infos)
        for worker_id in left:
            self.index.forget(worker_id)
            self._silent.pop(worker_id, None)
        self._forget_agreement_if_alone()
        return new, left

    def welcome(self, worker_id: str, facts: WorkerFacts) -> None:
        """Compare a worker's handshake with what the others agree on. It is ready after its first report.

        Raises:
            MismatchError: the worker cannot be part of this cluster; it is in state `refused`.
        """
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        worker.facts = facts
        self.workers.move(worker, State.STARTING)
        self._forget_agreement_if_alone()
        difference = None if self._agreed is None else _difference(self._agreed, facts)
        if difference is not None:
            self.workers.move(worker, State.REFUSED, difference)
            raise MismatchError(difference)

    def report(self, worker_id: str, load: WorkerLoad) -> None:
        """Take a load report."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.facts is None or worker.state is State.REFUSED:
            return
        worker.take_report(load)
        state = State.DRAINING if load.is_draining else State.READY
        if worker.state is not state:
            self.workers.move(worker, state, "asked to drain" if load.is_draining else "")
        self._agreed = self._agreed or worker.facts

    def refuse(self, worker_id: str, reason: str) -> None:
        """A worker is not what it should be."""
        self._take_out(worker_id, State.REFUSED, reason)

    def lose(self, worker_id: str, reason: str) -> None:
        """A worker is gone: nothing is placed there any more, and its prefixes vanish."""
        if self._take_out(worker_id, State.LOST, reason):
            self.counters["workers_lost_total"] += 1

    def agreed(self) -> WorkerFacts | None:
        """Return what the ready workers agree on, with the smallest window among them; None while there are none."""
        return self._agreed

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
            if not self._reservations:
                assert account == Account(), f"{worker.info.worker_id} keeps {account} without a reservation"

    # Inside.

    def _decoders(self, request: PlacementRequest) -> Sequence[Candidate]:
        ready = self.workers.ready(*_DECODERS)
        if ready.workers and not request.excluded and ready.all_finish(request.num_tokens, request.max_output_tokens):
            return ready.candidates
        decoders = [worker for worker in ready.workers if worker.info.worker_id not in request.excluded]
        if not decoders:
            states = self.workers.states(*_DECODERS)
            failed = f"; {', '.join(sorted(request.excluded))} failed this request" if request.excluded else ""
            raise WorkerLostError(f"no decode worker can take a request: {states}{failed}", RETRY_AFTER_S)
        roomy = [worker for worker in decoders if worker.holds(request.num_tokens)]
        if not roomy:
            largest = max(worker.facts.pool_tokens for worker in decoders if worker.facts is not None)
            raise InvalidRequestError(
                f"prompt has {request.num_tokens} tokens, the largest pool of a worker holds {largest}, output included"
            )
        ample = [worker for worker in roomy if worker.can_finish(request.num_tokens, request.max_output_tokens)]
        return [worker.candidate for worker in ample or roomy]  # who cannot finish it will say so, with need and limit

    def _prefillers(self, request: PlacementRequest) -> Sequence[Candidate]:
        ready = self.workers.ready(Role.PREFILL)
        if not request.excluded and request.num_tokens < ready.pool_tokens:
            return ready.candidates
        return [
            worker.candidate
            for worker in ready.workers
            if worker.info.worker_id not in request.excluded and worker.holds(request.num_tokens)
        ]

    def _row(self, candidate: Candidate) -> Worker:
        worker = self.workers.get(candidate.worker_id)
        assert worker is not None
        return worker

    def _row_or_stranger(self, worker_id: str) -> Worker:
        """Return a row, or for an unknown worker one of its own that nobody else will see."""
        return self.workers.get(worker_id) or Worker(WorkerInfo(worker_id, "", Role.DECODE))

    def _reserve(
        self, placement: Placement, decode: Worker, prefill: Worker | None, request: PlacementRequest
    ) -> Reservation:
        assert decode.facts is not None
        hits = placement.decode_hit_blocks if prefill is None else placement.prefill_hit_blocks
        queued = max(0, request.num_tokens - hits * decode.facts.block_tokens)
        tokens = _Tokens(queued, request.num_tokens + request.max_output_tokens, len(request.hashes))
        reservation = Reservation(self, placement, decode, prefill, tokens)
        self._reservations.add(reservation)
        return reservation

    def _count_fallback(self, request: PlacementRequest) -> None:
        if self.workers.num_configured(Role.PREFILL) == 0:
            return
        self.counters["local_prefill_fallback"] += 1
        if not self._has_fallen_back:
            self._has_fallen_back = True
            states = self.workers.states(Role.PREFILL)
            log(
                _LOG,
                logging.WARNING,
                f"no prefill worker can be used ({states}): decode workers prefill; counted as local_prefill_fallback",
                request_id=request.request_id,
            )

    def _watch_silence(self, worker_id: str) -> None:
        """Say so when a worker that must have cached something has never announced it: its hits would always be 0."""
        if self.index.num_blocks_of(worker_id):
            self._silent.pop(worker_id, None)
            return
        self._silent[worker_id] += 1
        if self._silent[worker_id] == _SILENT_ENDS:
            self.counters["silent_cache"] += 1
            log(_LOG, logging.WARNING, "announces no cached block: placed as if it had none", worker_id=worker_id)

    def _take_out(self, worker_id: str, state: State, reason: str) -> bool:
        worker = self.workers.get(worker_id)
        if worker is None:
            return False
        was = worker.state
        self.workers.move(worker, state, reason)
        worker.forget_report()
        self.index.forget(worker_id)
        self._forget_agreement_if_alone()
        return was is not state

    def _forget_agreement_if_alone(self) -> None:
        """When no worker is left that it could contradict, the next one decides what is true."""
        if not any(worker.state in (State.READY, State.DRAINING) for worker in self.workers):
            self._agreed = None


def _difference(agreed: WorkerFacts, facts: WorkerFacts) -> str | None:
    for name, ours, theirs in (
        ("model id", agreed.model_id, facts.model_id),
        ("block layout", agreed.layout, facts.layout),
        ("probe hash", agreed.hash_probe.hex(), facts.hash_probe.hex()),
    ):
        if ours != theirs:
            return f"{name} is {theirs}, the cluster's is {ours}"
    return None
