"""A decode worker: admission in order of arrival, continuous batching, prompt chunks that ride along (role `both`).

Modelled after decode/scheduler.py, with one difference: blocks for the whole answer are reserved at admission, so
nothing is ever preempted here and a full pool makes requests wait instead.
"""

import heapq
from collections import deque
from itertools import pairwise
from typing import Protocol

from common.errors import BatonError, InvalidRequestError, OverloadedError
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.pool import SimulatedPool
from loadtest.simulator.profile import Profile
from loadtest.simulator.step_count import StepCount
from loadtest.simulator.stretch import Stretch


class DecodeEvents(Protocol):
    """Who is told of a decode worker's doings."""

    def start_prefill(self, job: Job) -> None:
        """There are blocks for a prompt that another worker prefills."""
        ...

    def on_first_token(self, job: Job) -> None:
        """The first token was sampled here."""
        ...

    def on_finished(self, job: Job, gaps: tuple[float, ...]) -> None:
        """The last token was sampled."""
        ...

    def on_failed(self, job: Job, error: BatonError) -> None:
        """The request was refused."""
        ...

    def on_load(self, worker: "DecodeWorker") -> None:
        """The load has changed."""
        ...


class DecodeWorker:
    """Owned by one simulation.

    waiting ──admit──► landing ──land──► joining ──next step──► running ──last token──► gone
                └─► prompts (prefilled here) ──────▲
    """

    def __init__(
        self,
        worker_id: str,
        profile: Profile,
        timeline: Timeline,
        pool: SimulatedPool,
        events: DecodeEvents,
        keeps_gaps: bool,
    ) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.queued_tokens = 0
        self.done = StepCount()
        self._profile = profile
        self._timeline = timeline
        self._events = events
        self._keeps_gaps = keeps_gaps
        self._waiting: deque[Job] = deque()
        self._num_admitted = 0
        self._prompts: list[Job] = []
        self._chunks: list[tuple[Job, int]] = []
        self._joining: list[Job] = []
        self._running: list[tuple[int, int, Job]] = []  # a heap by the step that makes the last token
        self._context = 0
        self._step = 0
        self._stretch: Stretch | None = None
        self._stretches: list[Stretch] = []
        self._end_number = 0

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return self._num_admitted

    def add(self, job: Job) -> None:
        """Queue a request, or refuse it when the queue is full or the pool could never hold it."""
        if len(self._waiting) >= self._profile.waiting_max:
            self._events.on_failed(job, OverloadedError(f"{len(self._waiting)} requests wait on {self.worker_id}"))
            return
        if self._num_blocks(job) > self._profile.pool_blocks:
            limit = self._profile.pool_blocks
            self._events.on_failed(job, InvalidRequestError(f"{self._num_blocks(job)} blocks, the pool has {limit}"))
            return
        if not job.is_remote:
            self.queued_tokens += job.num_prompt
        self._waiting.append(job)
        self._admit()
        self._events.on_load(self)

    def land(self, job: Job) -> None:
        """All KV of a request's prompt is here."""
        assert job.decode_lease is not None
        self.pool.seal(job.decode_lease, job.prompt_names(self._profile.block_tokens))
        self._join(job)
        self._wake()

    def abandon(self, job: Job) -> None:
        """Give back the blocks of a request whose prefill failed."""
        assert job.decode_lease is not None
        self.pool.release(job.decode_lease)
        self._num_admitted -= 1
        self._admit()
        self._events.on_load(self)

    def _admit(self) -> None:
        block_tokens = self._profile.block_tokens
        while self._waiting and self._num_admitted < self._profile.running_max:
            job = self._waiting[0]
            names = job.prompt_names(block_tokens) if job.is_remote else job.reusable_names(block_tokens)
            job.decode_lease = self.pool.reserve(names, self._num_blocks(job))
            if job.decode_lease is None:
                break
            self._waiting.popleft()
            self._num_admitted += 1
            held = len(job.decode_lease.names) * block_tokens
            job.num_sent = held
            if job.is_remote:
                self._events.start_prefill(job)
                continue
            job.num_computed = job.num_cached = held
            self.queued_tokens -= held
            self._prompts.append(job)
        self._wake()

    def _num_blocks(self, job: Job) -> int:
        return -(-(job.num_prompt + job.num_output) // self._profile.block_tokens)

    def _join(self, job: Job) -> None:
        job.joined = self._timeline.now()
        if job.num_output == 1:
            self._finish(job)
        else:
            self._joining.append(job)

    def _wake(self) -> None:
        """Begin a stretch, or end the present one at the next step, when there is something to let in."""
        if not self._joining and not self._prompts:
            return
        if self._stretch is None:
            self._begin()
            return
        begun = self._stretch.steps_begun(self._timeline.now())
        if begun < self._stretch.num_steps:
            self._stretch.num_steps = begun
            self._await_end(self._stretch)

    def _begin(self) -> None:
        for job in self._joining:
            heapq.heappush(self._running, (self._step + job.num_output - 2, job.number, job))
            self._context += job.num_prompt + 1
        self._plan_chunks()
        if not self._running and not self._chunks:
            self._stretch = None
            return
        step = self._profile.step
        extra = sum(step.prefill_s(count, job.num_computed) for job, count in self._chunks)
        num_steps = 1 if self._chunks else self._running[0][0] - self._step + 1
        stretch = Stretch.of(
            step, self._step, self._timeline.now(), num_steps, len(self._running), self._context, extra
        )
        for job in self._joining:
            job.first_step, job.second_token = self._step, stretch.end_of(1)
        self._joining = []
        self._stretch = stretch
        self._await_end(stretch)

    def _plan_chunks(self) -> None:
        self._chunks = []
        budget = self._profile.decode_token_budget - len(self._running)
        for job in self._prompts:
            if budget <= 0:
                break
            if job.prefill_started is None:
                job.prefill_started = self._timeline.now()
            count = min(budget, job.num_uncomputed)
            self._chunks.append((job, count))
            budget -= count

    def _await_end(self, stretch: Stretch) -> None:
        self._end_number += 1
        number = self._end_number
        self._timeline.at(stretch.end_of(stretch.num_steps), lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._end_number:
            return  # the stretch was cut short after this was asked for
        stretch = self._stretch
        assert stretch is not None
        self._step += stretch.num_steps
        self.done.add_stretch(stretch, len(self._running), self._context)
        for job, count in self._chunks:
            self.done.add_chunk(count, job.num_computed)
        self._context += len(self._running) * stretch.num_steps
        if self._keeps_gaps:
            self._stretches.append(stretch)
        self._stretch = None
        while self._running and self._running[0][0] < self._step:
            job = heapq.heappop(self._running)[2]
            self._context -= job.num_prompt + job.num_output
            self._finish(job)
        self._apply_chunks()
        self._events.on_load(self)
        if self._stretch is None:
            self._begin()

    def _apply_chunks(self) -> None:
        for job, count in self._chunks:
            job.num_computed += count
            self.queued_tokens -= count
            assert job.decode_lease is not None
            self.pool.seal(job.decode_lease, job.computed_names(self._profile.block_tokens))
            if job.num_uncomputed:
                continue
            self._prompts.remove(job)
            self._events.on_first_token(job)
            self._join(job)
        self._chunks = []

    def _finish(self, job: Job) -> None:
        assert job.decode_lease is not None
        self.pool.seal(job.decode_lease, job.names)
        self.pool.release(job.decode_lease)
        self._num_admitted -= 1
        self._events.on_finished(job, self._gaps(job))
        self._admit_later()

    def _admit_later(self) -> None:
        # Not now: _finish may run in the middle of a step's end.
        if self._waiting:
            self._timeline.after(0.0, self._admit)

    def _gaps(self, job: Job) -> tuple[float, ...]:
        if not self._keeps_gaps or job.num_output < 2:
            return ()
        last = job.first_step + job.num_output - 2
        times = [job.first_token]
        for stretch in self._stretches_from(job.first_step):
            begin = max(job.first_step, stretch.first_step) - stretch.first_step
            until = min(last, stretch.first_step + stretch.num_steps - 1) - stretch.first_step
            times += [stretch.end_of(step + 1) for step in range(begin, until + 1)]
        return tuple(after - before for before, after in pairwise(times))

    def _stretches_from(self, step: int) -> list[Stretch]:
        """Return the stretches from the one that holds `step` on."""
        low, high = 0, len(self._stretches)
        while low < high:
            middle = (low + high) // 2
            if self._stretches[middle].first_step + self._stretches[middle].num_steps <= step:
                low = middle + 1
            else:
                high = middle
        return self._stretches[low:]
