"""The simulated cluster: the real router in the middle, cost-model workers around it, one client.

What is real: the router's core (index, policies, reservations, admission), and in each worker the scheduler of prompts
or streams and the block pool; their numbered cache events and load reports reach the router as often as real ones, and
without delay. What is modelled: the time of steps and transfers (profile.py), and of a message (hop_s).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from cluster.router.front import Asked, Front
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.registry import policy_named
from cluster.router.router import Router
from cluster.router.worker import Role, WorkerFacts, WorkerInfo, WorkerLoad
from common.config import RouterConfig
from common.errors import BatonError, ConfigError
from engine.worker_times import FETCH_MAX_S, REPORT_INTERVAL_S
from loadtest.records import RequestRecord, ServerTiming
from loadtest.simulator.decode import DecodeWorker
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.prefill import PrefillWorker
from loadtest.simulator.profile import Profile
from loadtest.simulator.worker import Link, SimulatedWorker, transfer


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How many workers of each role, and how they are chosen."""

    prefill: int = 1
    decode: int = 1
    both: int = 0
    policy: str = "cost"
    admission: bool = True
    """Requests wait at the router when all workers have enough to do; otherwise they go to a worker's queue at once."""


class SimulatedCluster:
    """Takes requests and hands out records, all in virtual time. Owned by one simulation."""

    def __init__(
        self, profile: Profile, shape: ClusterShape, timeline: Timeline, seed: int, keeps_gaps: bool = True
    ) -> None:
        if shape.decode + shape.both == 0:
            raise ConfigError("a cluster needs a decode worker or one of role `both`")
        config = RouterConfig()
        ahead_s = config.prefill_ahead_s if shape.admission else math.inf
        self.router = Router(policy_named(shape.policy), Random(f"router/{seed}"), timeline, ahead_s)
        self.front = Front(self.router, config, self._arm)
        self._alarm_at = math.inf
        self._profile = profile
        self._timeline = timeline
        self._prefill: dict[str, PrefillWorker] = {}
        self._decode: dict[str, DecodeWorker] = {}
        self._workers: dict[str, SimulatedWorker] = {}
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
        for worker in self._workers.values():
            worker.check_idle()

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
        self.router.finished(job.num_answered)
        self._reservations.pop(job).release(exposed_s)
        self.front.pump()
        self._end(job, self._record(job, gaps))

    def on_failed(self, job: Job, error: BatonError) -> None:
        """Hand out a failed request's record, and give back what it held."""
        if (reservation := self._reservations.pop(job, None)) is not None:
            reservation.release()
            self.front.pump()
        if job.decode_worker:
            self._decode[job.decode_worker].abandon(job)
        self._end(job, self._failed(job, error))

    def on_load(self, worker: SimulatedWorker) -> None:
        """Let a worker report now, or, as real ones do, when its last report is an interval old."""
        now, due = self._timeline.now(), worker.reported_at + REPORT_INTERVAL_S
        if worker.reported_at > now:
            return  # it is about to
        if due <= now:
            self._report(worker)
        else:
            worker.reported_at = due
            self._timeline.at(due, partial(self._report, worker))

    def link_of(self, worker_id: str) -> Link:
        """Return a worker's link."""
        return self._workers[worker_id].link

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
            token_budget=profile.prefill_token_budget,
            block_bytes=profile.kv_bytes_per_token * profile.block_tokens,
        )
        running_max = profile.running_max if shape.admission else 0
        decodes = replace(facts, running_max=running_max, token_budget=profile.decode_token_budget)
        self.router.set_workers(infos)
        for info in infos:
            name = info.worker_id
            self.router.welcome(name, facts if info.role is Role.PREFILL else decodes)
            self.router.index.replace(name, ())
            if info.role is Role.PREFILL:
                self._workers[name] = self._prefill[name] = PrefillWorker(name, profile, timeline, self)
            else:
                self._workers[name] = self._decode[name] = DecodeWorker(name, profile, timeline, self, self._keeps_gaps)
            self.router.report(name, WorkerLoad())

    def _report(self, worker: SimulatedWorker) -> None:
        """Pass on what a worker's cache gained and lost, and its load."""
        worker.reported_at = self._timeline.now()
        worker.catch_up()
        pool = worker.books.pool
        for change in pool.drain_events():
            self.router.index.apply(worker.worker_id, change.number, change.stored, change.hashes)
        load = WorkerLoad(
            worker.queued_tokens,
            worker.num_waiting,
            worker.num_running,
            used_blocks=pool.num_used,
            free_blocks=pool.num_free,
            steps=worker.done.totals,
            fetches=worker.fetches,
        )
        self.router.report(worker.worker_id, load)
        self.front.pump()

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
        worker = self._workers[job.prefill_worker]
        missing = worker.num_missing(names)
        if not missing or self._workers[job.holder].num_missing(names):
            then()
            return
        num_tokens = missing * self._profile.block_tokens
        num_bytes = num_tokens * self._profile.kv_bytes_per_token
        start = self._timeline.now()
        given_up = start + FETCH_MAX_S
        end = transfer(self.link_of(job.holder), worker.link, num_bytes, self._profile, start, given_up)
        end += 2 * self._profile.link.latency_s

        def ended() -> None:
            if end <= given_up:
                worker.receive(names)
                worker.fetched(num_tokens, end - start)
            else:
                worker.gave_up(num_tokens, FETCH_MAX_S)
            self.on_load(worker)
            then()

        self._timeline.at(min(end, given_up), ended)

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
            last_token_s=end if job.num_answered > 1 else first,
            end_s=end,
            prompt_tokens=job.num_prompt,
            output_tokens=job.num_answered,
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
                first_decode_s=job.second_token - job.joined if job.num_answered > 1 else 0.0,
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
