"""A decode worker (role `decode` or `both`): the real scheduler over real books, steps by the cost model.

The scheduler plans where the batch may change: where a sequence joins or ends, where prompts are computed, and where
the pool might not have blocks for all. The steps between, in which every sequence gets one more token, are taken
together (stretch.py); whoever looks into the pool meanwhile first brings it up to the moment.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Protocol

from common.errors import BatonError
from decode.scheduler import DecodeScheduler, PlannedChunk
from loadtest.simulator.batch import Batch, Chunk, SimulatedStream
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.profile import Profile
from loadtest.simulator.stretch import Stretch
from loadtest.simulator.worker import SimulatedWorker


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


_UNBOUNDED = 1 << 30


class DecodeWorker(SimulatedWorker):
    """Owned by one simulation."""

    def __init__(
        self,
        worker_id: str,
        profile: Profile,
        timeline: Timeline,
        events: DecodeEvents,
        keeps_gaps: bool,
        stretch_max: int = _UNBOUNDED,
    ) -> None:
        """Make an idle worker.

        Args:
            worker_id: unique in the simulation.
            profile: its costs and limits.
            timeline: the simulation's.
            events: who is told.
            keeps_gaps: whether finished requests come with the gaps between their tokens.
            stretch_max: most steps that are taken together; of 1, every step is planned.
        """
        super().__init__(worker_id, profile)
        self._timeline = timeline
        self._events = events
        self._keeps_gaps = keeps_gaps
        self._scheduler: DecodeScheduler[SimulatedStream] = DecodeScheduler(
            self.books, profile.running_max, profile.decode_token_budget, profile.itl_target_s or None
        )
        self._streams: dict[Job, SimulatedStream] = {}
        self._batch = Batch(self.books, profile, stretch_max)
        self.num_preemptions = 0
        self._end_number = 0
        self._has_computed = False
        """Whether a prompt was ever to be computed here: mostly never, and then nobody need be looked at."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute here, and tokens to compute again."""
        if not self._has_computed:
            return 0
        here = (stream for stream in chain(self._scheduler.waiting, self._scheduler.running) if not stream.is_remote)
        return sum(count for stream in here if (count := stream.own.num_uncomputed) > 1)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return len(self._scheduler.landing) + len(self._scheduler.running)

    def add(self, job: Job) -> None:
        """Queue a request, or refuse it when the queue is full or the pool could never hold it."""
        try:
            self.books.check_prompt_fits(job.num_prompt)
            self._scheduler.check_fits(job.num_prompt, job.num_output)
            self._check_queue(len(self._scheduler.waiting))
        except BatonError as error:
            self._events.on_failed(job, error)
            return
        end_tokens = min(job.num_prompt + job.num_output, self._scheduler.capacity_tokens)
        own = self._sequence(job)
        stream = SimulatedStream(sequence=own, own=own, is_remote=job.is_remote, job=job, end_tokens=end_tokens)
        self._streams[job] = stream
        self._has_computed = self._has_computed or not job.is_remote
        self._scheduler.add(stream)
        self._changed()

    def land(self, job: Job) -> None:
        """All KV of a request's prompt is here, and its first token."""
        self.catch_up()
        stream = self._streams[job]
        sequence = stream.own
        sequence.num_tokens += 1
        self.books.advance(sequence, sequence.num_tokens - 1)
        job.joined = self._timeline.now()
        if sequence.num_tokens == stream.end_tokens:
            self._finish(stream)
            self._admit()
            self._events.on_load(self)
        else:
            self._scheduler.join(stream)
        self._wake()

    def abandon(self, job: Job) -> None:
        """Give back what a request holds whose prefill failed, if it has come so far as to hold anything."""
        if (stream := self._streams.pop(job, None)) is None:
            return
        self._scheduler.remove(stream)
        self.books.pool.release(stream.own.block_table)
        self._changed()

    def catch_up(self) -> None:
        """See SimulatedWorker."""
        self._batch.catch_up(self._timeline.now())

    def receive(self, names: Sequence[bytes]) -> None:
        """See SimulatedWorker."""
        self.catch_up()
        super().receive(names)

    def check_idle(self) -> None:
        """Assert that no request is here."""
        super().check_idle()
        assert not self._streams
        assert self._batch.stretch is None

    def _changed(self) -> None:
        """Take note that a request has come or gone while a stretch may run."""
        self.catch_up()
        self._admit()
        self._wake()
        self._events.on_load(self)

    def _admit(self) -> None:
        """Give blocks to those who wait, as far as there are any; the books are up to the moment."""
        for stream in self._scheduler.admit():
            stream.job.num_sent = stream.first_block * self.books.block_tokens
            self._events.start_prefill(stream.job)

    def _wake(self) -> None:
        """Begin a stretch, or end the present one when its batch or its blocks must be looked at again."""
        stretch = self._batch.stretch
        if stretch is None:
            self._begin()
            return
        num_steps = self._batch.num_fitting()
        if len(self._scheduler.running) > len(self._batch):
            num_steps = min(num_steps, stretch.steps_begun(self._timeline.now()))
        if num_steps < stretch.num_steps:
            stretch.num_steps = num_steps
            self._await_end(stretch)

    def _begin(self) -> None:
        """Plan a step, and await the end of it and of those that are sure to be like it."""
        self._admit()
        plan = self._scheduler.plan()
        if plan.preempted:
            self.num_preemptions += len(plan.preempted)
            self._has_computed = True
        if (stretch := self._batch.begin(plan, self._timeline.now())) is not None:
            self._await_end(stretch)

    def _await_end(self, stretch: Stretch) -> None:
        self._end_number += 1
        number = self._end_number
        self._timeline.at(stretch.end_of(stretch.num_steps), lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._end_number:
            return  # the stretch was cut short after this was asked for
        stretch, decoding, prompts = self._batch.end(), self._batch.decoding, self._batch.prompts
        self.done.add_stretch(stretch)
        if self._profile.itl_target_s:
            self._tell_scheduler(stretch)
        if self._keeps_gaps:
            for stream in decoding:
                stream.stretches.append(stretch)
        for stream in decoding:
            if stream.own.num_tokens == stream.end_tokens:
                self._finish(stream)
        for chunk in prompts:
            self._apply_prompt(chunk, stretch)
        self._begin()
        self._events.on_load(self)

    def _tell_scheduler(self, stretch: Stretch) -> None:
        """Let the scheduler learn what steps cost, as a real worker's does."""
        chunks = [*(PlannedChunk(stream, 1) for stream in self._batch.decoding), *self._batch.prompts]
        for before, after in pairwise(map(stretch.end_of, range(stretch.num_steps + 1))):
            self._scheduler.ran(chunks, after - before)

    def _apply_prompt(self, chunk: Chunk, stretch: Stretch) -> None:
        stream, num_tokens = chunk
        sequence = stream.own
        self.done.add_chunk(num_tokens, sequence.num_computed)
        self.books.advance(sequence, sequence.num_computed + num_tokens)
        if sequence.num_uncomputed:
            return
        sequence.num_tokens += 1
        if sequence.num_output_tokens == 1:
            stream.job.joined = self._timeline.now()
            self._events.on_first_token(stream.job)
        else:  # it was preempted
            if sequence.num_output_tokens == 2:
                stream.job.second_token = self._timeline.now()
            if self._keeps_gaps:
                stream.stretches.append(stretch)
        if sequence.num_tokens == stream.end_tokens:
            self._finish(stream)

    def _finish(self, stream: SimulatedStream) -> None:
        sequence = stream.own
        self._scheduler.remove(stream)
        self.books.pool.release(sequence.block_table)
        del self._streams[stream.job]
        stream.job.num_answered = sequence.num_output_tokens
        self._events.on_finished(stream.job, stream.gaps() if self._keeps_gaps else ())
