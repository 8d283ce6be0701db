"""A decode worker (role `decode` or `both`): the real scheduler over real books, steps by the cost model.

The scheduler plans where the batch may change: where a sequence joins or ends, where prompts are computed, and where
the pool might not have blocks for all. The steps between, in which every sequence gets one more token, are taken
together (stretch.py); whoever looks into the pool meanwhile first brings it up to the moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Protocol

from common.errors import BatonError
from decode.scheduler import DecodeScheduler, PlannedChunk, Stream
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.profile import Profile
from loadtest.simulator.sequence import SimulatedSequence
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


@dataclass(slots=True, eq=False, kw_only=True)
class _SimulatedStream(Stream):
    sequence: SimulatedSequence
    job: Job
    end_tokens: int
    """Length with the last token."""
    stretches: list[Stretch] = field(default_factory=list)
    """Those in which it got a token a step, if gaps are kept."""


_UNBOUNDED = 1 << 30
_Chunk = PlannedChunk[_SimulatedStream]


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
        self._stretch_max = stretch_max
        self._timeline = timeline
        self._events = events
        self._keeps_gaps = keeps_gaps
        self._scheduler: DecodeScheduler[_SimulatedStream] = DecodeScheduler(
            self.books, profile.running_max, profile.decode_token_budget, profile.itl_target_s or None
        )
        self._streams: dict[Job, _SimulatedStream] = {}
        self._decoding: list[_SimulatedStream] = []
        """Of the running stretch: those that get a token a step."""
        self._prompts: list[_Chunk] = []
        """Of the running step: prompt chunks."""
        self._stretch: Stretch | None = None
        self._num_applied = 0
        """Steps of the stretch that the books know of."""
        self._num_quiet = 0
        """So many leading steps of the stretch fill no block: meanwhile the pool is as it was when it began."""
        self.num_preemptions = 0
        self._end_number = 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute here, and tokens to compute again."""
        here = (stream for stream in chain(self._scheduler.waiting, self._scheduler.running) if not stream.is_remote)
        return sum(count for stream in here if (count := stream.sequence.num_uncomputed) > 1)

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
        stream = _SimulatedStream(sequence=self._sequence(job), is_remote=job.is_remote, job=job, end_tokens=end_tokens)
        self._streams[job] = stream
        self._scheduler.add(stream)
        self._changed()

    def land(self, job: Job) -> None:
        """All KV of a request's prompt is here, and its first token."""
        self.catch_up()
        stream = self._streams[job]
        sequence = stream.sequence
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
        self.books.pool.release(stream.sequence.block_table)
        self._changed()

    def catch_up(self) -> None:
        """Bring the books up to the steps that are over; the last one of a stretch is `_end`'s."""
        if self._stretch is None:
            return
        num_steps = self._stretch.steps_begun(self._timeline.now()) - 1
        if num_steps > max(self._num_quiet, self._num_applied):
            self._apply(num_steps)

    def receive(self, names: Sequence[bytes]) -> None:
        """See SimulatedWorker."""
        self.catch_up()
        super().receive(names)

    def check_idle(self) -> None:
        """Assert that no request is here."""
        super().check_idle()
        assert not self._streams
        assert self._stretch is None

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
        if self._stretch is None:
            self._begin()
            return
        self._cut(self._num_applied + self._num_fitting())
        if len(self._scheduler.running) > len(self._decoding) + len(self._prompts):
            self._cut(self._stretch.steps_begun(self._timeline.now()))

    def _cut(self, num_steps: int) -> None:
        assert self._stretch is not None
        if num_steps < self._stretch.num_steps:
            self._stretch.num_steps = num_steps
            self._await_end(self._stretch)

    def _begin(self) -> None:
        """Plan a step, and take as many together as are sure to be like it."""
        self._admit()
        plan = self._scheduler.plan()
        self.num_preemptions += len(plan.preempted)
        self._decoding = [stream for stream in plan.decodes if stream.sequence.num_output_tokens]
        self._prompts = plan.prompts
        if len(self._decoding) < len(plan.decodes):  # of whose prompts all but a token was cached
            firsts = (stream for stream in plan.decodes if not stream.sequence.num_output_tokens)
            self._prompts = [*(PlannedChunk(stream, 1) for stream in firsts), *plan.prompts]
        self._num_applied = self._num_quiet = 0
        if not plan.decodes and not plan.prompts:
            self._stretch = None
            return
        num_steps = 1
        if not self._prompts and not plan.preempted:  # what was preempted may be admitted again at the next step
            num_steps = min(self._num_fitting(), self._num_until_one_ends(), self._stretch_max)
            self._num_quiet = self._num_until_a_block_is_full()
        self._stretch = self._stretch_of(num_steps)
        self._await_end(self._stretch)

    def _stretch_of(self, num_steps: int) -> Stretch:
        """Return the stretch that begins now, and note what begins with it."""
        now, step, context, extra_s = self._timeline.now(), self._profile.step, 0, 0.0
        fresh = []
        for stream in self._decoding:
            context += stream.sequence.num_tokens
            if stream.sequence.num_output_tokens == 1:
                fresh.append(stream)
        for stream, num_tokens in self._prompts:
            extra_s += step.prefill_s(num_tokens, stream.sequence.num_computed)
            if stream.job.prefill_started is None:
                stream.job.prefill_started, stream.job.num_cached = now, stream.sequence.num_cached
        stretch = Stretch.of(step, now, num_steps, len(self._decoding), context, extra_s)
        for stream in fresh:
            stream.job.second_token = stretch.end_of(1)
        return stretch

    def _num_until_one_ends(self) -> int:
        return min(stream.end_tokens - stream.sequence.num_tokens for stream in self._decoding)

    def _num_until_a_block_is_full(self) -> int:
        block_tokens = self.books.block_tokens
        return block_tokens - 1 - max(stream.sequence.num_computed % block_tokens for stream in self._decoding)

    def _num_fitting(self) -> int:
        """Return how many steps, the running one among them, are sure to find blocks for all sequences of the batch."""
        available, count, block_tokens = self.books.pool.num_available, len(self._decoding), self.books.block_tokens
        if not count:
            return 1
        if available >= count:
            return 1 + available // count * block_tokens
        # The sequences' next blocks, the soonest first: that after the last available one ends the stretch.
        rooms = sorted(
            len(stream.sequence.block_table) * block_tokens - stream.sequence.num_tokens for stream in self._decoding
        )
        return 1 + rooms[available]

    def _await_end(self, stretch: Stretch) -> None:
        self._end_number += 1
        number = self._end_number
        self._timeline.at(stretch.end_of(stretch.num_steps), lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._end_number:
            return  # the stretch was cut short after this was asked for
        stretch = self._stretch
        assert stretch is not None
        self._apply(stretch.num_steps)
        self.done.add_stretch(stretch)
        if self._profile.itl_target_s:
            self._tell_scheduler(stretch)
        self._stretch = None
        if self._keeps_gaps:
            for stream in self._decoding:
                stream.stretches.append(stretch)
        for stream in self._decoding:
            if stream.sequence.num_tokens == stream.end_tokens:
                self._finish(stream)
        for chunk in self._prompts:
            self._apply_prompt(chunk, stretch)
        self._begin()
        self._events.on_load(self)

    def _tell_scheduler(self, stretch: Stretch) -> None:
        """Let the scheduler learn what steps cost, as a real worker's does."""
        chunks = [*(PlannedChunk(stream, 1) for stream in self._decoding), *self._prompts]
        for before, after in pairwise(map(stretch.end_of, range(stretch.num_steps + 1))):
            self._scheduler.ran(chunks, after - before)

    def _apply(self, num_steps: int) -> None:
        """Note that so many steps of the stretch are over, as far as they decode."""
        fresh, self._num_applied = num_steps - self._num_applied, num_steps
        if num_steps > self._num_quiet:
            self._apply_blocks(fresh, is_over=self._stretch is not None and num_steps == self._stretch.num_steps)
            return
        for stream in self._decoding:
            sequence = stream.sequence
            sequence.num_tokens += fresh
            sequence.num_computed += fresh

    def _apply_blocks(self, fresh: int, *, is_over: bool) -> None:
        """Note so many further steps, and the blocks that they have filled and taken."""
        block_tokens = self.books.block_tokens
        for stream in self._decoding:
            sequence = stream.sequence
            sequence.num_tokens += fresh
            # After the last step the next plan takes the block for the last token.
            need = sequence.num_tokens - is_over
            if need > len(sequence.block_table) * block_tokens:
                missing = self.books.blocks_for(need) - len(sequence.block_table)
                sequence.block_table += self.books.pool.allocate(missing)
            self.books.advance(sequence, sequence.num_tokens - 1)

    def _apply_prompt(self, chunk: _Chunk, stretch: Stretch) -> None:
        stream, num_tokens = chunk
        sequence = stream.sequence
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

    def _finish(self, stream: _SimulatedStream) -> None:
        sequence = stream.sequence
        self._scheduler.remove(stream)
        self.books.pool.release(sequence.block_table)
        del self._streams[stream.job]
        stream.job.num_answered = sequence.num_output_tokens
        self._events.on_finished(stream.job, self._gaps(stream))

    def _gaps(self, stream: _SimulatedStream) -> tuple[float, ...]:
        if not self._keeps_gaps:
            return ()
        ends = [stretch.end_of(step + 1) for stretch in stream.stretches for step in range(stretch.num_steps)]
        return tuple(after - before for before, after in pairwise([stream.job.first_token, *ends]))
