"""The simulated cluster: the real router in the middle, cost-model workers around it, one client.

What is real: the router's core (index, policies, reservations, admission), fed with numbered cache events and load
reports, which reach it without delay here. What is modelled: workers and links (profile.py), a message's time (hop_s).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from cluster.router.front import Asked, Front
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.registry import POLICIES
from cluster.router.router import Router
from cluster.router.worker_table import Role, WorkerFacts, WorkerInfo, WorkerLoad
from common.config import RouterConfig
from common.errors import BatonError, ConfigError
from loadtest.records import RequestRecord, ServerTiming
from loadtest.simulator.decode import DecodeWorker
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.pool import SimulatedPool
from loadtest.simulator.prefill import Link, PrefillWorker, transfer
from loadtest.simulator.profile import Profile


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How many workers of each role, and how they are chosen."""

    prefill: int = 1
    decode: int = 1
    both: int = 0
    policy: str = "cost"
    admission: bool = True
    """Requests wait at the router when all workers have enough to do; otherwise they go to a worker's queue at once."""


class _IndexFeed:
    """Numbers one worker's cache events and hands them to the router's index."""

    def __init__(self, router: Router, worker_id: str) -> None:
        self._router = router
        self._worker_id = worker_id
        self._number = 0
        router.index.replace(worker_id, ())

    def changed(self, stored: bool, names: Sequence[bytes]) -> None:
        """Take one event."""
        self._number += 1
        self._router.index.apply(self._worker_id, self._number, stored, names)


class SimulatedCluster:
    """Takes requests and hands out records, all in virtual time. Owned by one simulation."""

    def __init__(
        self, profile: Profile, shape: ClusterShape, timeline: Timeline, seed: int, keeps_gaps: bool = True
    ) -> None:
        if shape.policy not in POLICIES:
            raise ConfigError(f"no policy {shape.policy!r}; there are {', '.join(POLICIES)}")
        if shape.decode + shape.both == 0:
            raise ConfigError("a cluster needs a decode worker or one of role `both`")
        config = RouterConfig()
        ahead_s = config.prefill_ahead_s if shape.admission else math.inf
        self.router = Router(POLICIES[shape.policy](), Random(f"router/{seed}"), timeline, ahead_s)
        self.front = Front(self.router, config, self._arm)
        self._alarm_at = math.inf
        self._profile = profile
        self._timeline = timeline
        self._links: dict[str, Link] = {}
        self._prefill: dict[str, PrefillWorker] = {}
        self._decode: dict[str, DecodeWorker] = {}
        self._reservations: dict[Job, Reservation] = {}
        self._done: dict[Job, Callable[[RequestRecord], None]] = {}
        self._keeps_gaps = keeps_gaps
        self._build(shape)

    def submit(self, job: Job, done: Callable[[RequestRecord], None]) -> None:
        """Send a request now; `done` gets its record when it has ended."""
        self._done[job] = done
        self._timeline.after(2 * self._profile.hop_s, partial(self._place, job))

    def check_idle(self) -> None:
        """Assert that nothing is left after the last request: no reservation, no used block."""
        self.front.check()
        assert self.front.num_waiting == 0
        assert self.router.num_reservations == 0
        assert not self._done
        workers: list[PrefillWorker | DecodeWorker] = [*self._prefill.values(), *self._decode.values()]
        for worker in workers:
            worker.pool.check(is_idle=True)
            assert worker.queued_tokens == 0

    # What the workers tell.

    def on_first_token(self, job: Job) -> None:
        """Take the first token's sampling, wherever it happened."""
        job.first_token = self._timeline.now()
        self._reservations[job].first_token()
        self.front.pump()

    def start_prefill(self, job: Job) -> None:
        """Send the prompt to its prefill worker."""
        start = partial(self._fetch, job, partial(self._prefill[job.prefill_worker].add, job))
        self._timeline.after(self._profile.hop_s, start)

    def on_pushed(self, job: Job) -> None:
        """Let the sequence decode."""
        job.landed = self._timeline.now()
        self._decode[job.decode_worker].land(job)

    def on_finished(self, job: Job, gaps: tuple[float, ...]) -> None:
        """Hand out the record; the client sees everything `2 * hop_s` later."""
        exposed_s = None if job.landed is None else job.landed - job.first_token
        self.router.finished(job.num_output)
        self._reservations.pop(job).release(exposed_s)
        self.front.pump()
        self._end(job, self._record(job, gaps))

    def on_failed(self, job: Job, error: BatonError) -> None:
        """Hand out a failed request's record, and give back what it held."""
        if (reservation := self._reservations.pop(job, None)) is not None:
            reservation.release()
            self.front.pump()
        if job.decode_lease is not None:
            self._decode[job.decode_worker].abandon(job)
        self._end(job, self._failed(job, error))

    def on_load(self, worker: PrefillWorker | DecodeWorker) -> None:
        """Pass a load report on."""
        match worker:
            case PrefillWorker():
                waiting, running = 0, worker.num_sequences
            case DecodeWorker():
                waiting, running = worker.num_waiting, worker.num_running
        load = WorkerLoad(
            worker.queued_tokens,
            waiting,
            running,
            used_blocks=worker.pool.num_used,
            free_blocks=worker.pool.num_free,
            steps=worker.done.totals,
        )
        self.router.report(worker.worker_id, load)
        self.front.pump()

    def link_of(self, worker_id: str) -> Link:
        """Return a worker's link."""
        return self._links[worker_id]

    # Inside.

    def _build(self, shape: ClusterShape) -> None:
        infos = [
            WorkerInfo(f"{role.value}-{number}", "simulated", role)
            for role, count in ((Role.PREFILL, shape.prefill), (Role.DECODE, shape.decode), (Role.BOTH, shape.both))
            for number in range(count)
        ]
        profile, timeline = self._profile, self._timeline
        facts = WorkerFacts(
            generation=1,
            model_id=profile.name,
            layout="simulated",
            block_tokens=profile.block_tokens,
            hash_probe=b"",
            num_blocks=profile.pool_blocks,
            context_tokens=profile.context_tokens,
        )
        decodes = replace(facts, running_max=profile.running_max) if shape.admission else facts
        self.router.set_workers(infos)
        for info in infos:
            name = info.worker_id
            self.router.welcome(name, facts if info.role is Role.PREFILL else decodes)
            self._links[name] = Link()
            pool = SimulatedPool(profile.pool_blocks, _IndexFeed(self.router, name))
            if info.role is Role.PREFILL:
                self._prefill[name] = PrefillWorker(name, profile, timeline, pool, self)
            else:
                self._decode[name] = DecodeWorker(name, profile, timeline, pool, self, self._keeps_gaps)
            self.router.report(name, WorkerLoad())

    def _place(self, job: Job) -> None:
        targets = job.level
        request = PlacementRequest(
            request_id=str(job.number),
            num_tokens=job.num_prompt,
            max_output_tokens=job.num_output,
            hashes=job.prompt_names(self._profile.block_tokens),
            ttft_target_s=targets.ttft_target_s,
            tpot_target_s=targets.tpot_target_s,
        )
        self.front.ask(Asked(request.request_id, request, level=targets), partial(self._placed, job))

    def _placed(self, job: Job, answer: Reservation | BatonError) -> None:
        if isinstance(answer, BatonError):
            self.on_failed(job, answer)
            return
        placement = answer.placement
        assert placement is not None
        self._reservations[job] = answer
        job.decode_worker = placement.decode.worker_id
        job.prefill_worker = job.decode_worker
        if placement.holder is not None:
            job.holder, job.fetched_blocks = placement.holder.worker_id, placement.holder_blocks
        if placement.prefill is not None:
            job.prefill_worker = placement.prefill.worker_id
            job.is_remote = True
        start = partial(self._decode[job.decode_worker].add, job)
        if placement.prefill is None:
            start = partial(self._fetch, job, start)
        self._timeline.after(self._profile.hop_s, start)

    def _arm(self) -> None:
        """Wake up when the first of those that wait has waited long enough."""
        end_s = self.front.next_end_s
        if end_s is not None and end_s < self._alarm_at:
            self._alarm_at = end_s
            self._timeline.at(end_s, self._expire)

    def _expire(self) -> None:
        self._alarm_at = math.inf
        self.front.expire()

    def _fetch(self, job: Job, then: Callable[[], None]) -> None:
        """Let the holder of a prompt's beginning push it to the worker that prefills, if it still has it."""
        names = job.names[: job.fetched_blocks]
        missing = len(names) - self._pool(job.prefill_worker).match(names)
        if missing <= 0 or self._pool(job.holder).match(names) < len(names):
            then()
            return
        num_bytes = missing * self._profile.block_tokens * self._profile.kv_bytes_per_token
        now = self._timeline.now()
        end = transfer(self._links[job.holder], self._links[job.prefill_worker], num_bytes, self._profile, now)
        self._timeline.at(end + 2 * self._profile.link.latency_s, partial(self._fetched, job, names, then))

    def _fetched(self, job: Job, names: Sequence[bytes], then: Callable[[], None]) -> None:
        pool = self._pool(job.prefill_worker)
        if (lease := pool.reserve(names, len(names))) is not None:
            pool.seal(lease, names)
            pool.release(lease)
        then()

    def _pool(self, worker_id: str) -> SimulatedPool:
        return (self._prefill.get(worker_id) or self._decode[worker_id]).pool

    def _end(self, job: Job, record: RequestRecord) -> None:
        done = self._done.pop(job)
        self._timeline.after(2 * self._profile.hop_s, lambda: done(record))

    def _record(self, job: Job, gaps: tuple[float, ...]) -> RequestRecord:
        hop = 2 * self._profile.hop_s
        end = self._timeline.now() + hop
        first = job.first_token + hop
        assert job.prefill_started is not None
        prefill = job.first_token - job.prefill_started
        exposed = 0.0 if job.landed is None else job.landed - job.first_token
        return RequestRecord(
            request_id=f"sim-{job.session}-{job.turn}",
            session=job.session,
            turn=job.turn,
            intended_s=job.intended,
            sent_s=job.sent,
            first_token_s=first,
            last_token_s=end if job.num_output > 1 else first,
            end_s=end,
            prompt_tokens=job.num_prompt,
            output_tokens=job.num_output,
            cached_tokens=job.num_cached,
            gaps_s=gaps,
            finish_reason="length",
            prefill_worker=job.prefill_worker,
            decode_worker=job.decode_worker,
            transport="local" if job.landed is None else "simulated",
            server=ServerTiming(
                ttft_s=first - job.sent,
                queue_s=first - job.sent - prefill,
                prefill_s=prefill,
                transfer_exposed_s=exposed,
                first_decode_s=job.second_token - job.joined if job.num_output > 1 else 0.0,
            ),
        )

    def _failed(self, job: Job, error: BatonError) -> RequestRecord:
        return RequestRecord(
            request_id=f"sim-{job.session}-{job.turn}",
            session=job.session,
            turn=job.turn,
            intended_s=job.intended,
            sent_s=job.sent,
            end_s=self._timeline.now() + 2 * self._profile.hop_s,
            error=type(error).__name__,
            error_message=error.message,
        )
