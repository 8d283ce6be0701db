"""The streams of a simulated decode worker that are in its running stretch, and what the books know of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decode.scheduler import PlannedChunk, StepPlan, Stream
from engine.bookkeeping import Bookkeeping
from loadtest.simulator.job import Job
from loadtest.simulator.profile import Profile
from loadtest.simulator.sequence import SimulatedSequence
from loadtest.simulator.stretch import Stretch


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedStream(Stream):
    """A request on a decode worker."""

    own: SimulatedSequence
    """`sequence`, as what it is here: of the same name it could not be compiled (tools/compile_simulator.py)."""
    job: Job
    end_tokens: int
    """Length with the last token."""
    stretches: list[Stretch] = field(default_factory=list)
    """Those in which it got a token a step, if gaps are kept."""

    def gaps(self) -> tuple[float, ...]:
        """Return the seconds between its tokens."""
        found, last = list[float](), self.job.first_token
        for stretch in self.stretches:
            first, *others = stretch.durations()
            found.append(stretch.start + first - last)
            found += others
            last = stretch.end_of(stretch.num_steps)
        return tuple(found)


Chunk = PlannedChunk[SimulatedStream]


class Batch:
    """What runs on one worker. The sequences are brought up to the moment as late as nobody can tell."""

    def __init__(self, books: Bookkeeping, profile: Profile, stretch_max: int) -> None:
        self.decoding: Sequence[SimulatedStream] = ()
        """Those that get a token a step."""
        self.prompts: Sequence[Chunk] = ()
        """Of the running step: prompt chunks."""
        self.stretch: Stretch | None = None
        self._books = books
        self._profile = profile
        self._stretch_max = stretch_max
        self._num_applied = 0
        """Steps of the stretch that the books know of."""
        self._num_quiet = 0
        """So many leading steps of the stretch fill no block: meanwhile the pool is as it was when it began."""

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prompts)

    def begin(self, plan: StepPlan[SimulatedStream], now: float) -> Stretch | None:
        """Take a plan, and return as many steps together as are sure to be like it; None if it is empty."""
        self._take(plan)
        self._num_applied = self._num_quiet = 0
        if not self:
            self.stretch = None
            return None
        block_tokens, step = self._books.block_tokens, self._profile.step
        context, num_left, filled, fresh = 0, self._stretch_max, 0, list[Job]()
        for stream in self.decoding:
            sequence = stream.own
            num_tokens = sequence.num_tokens
            context += num_tokens
            if stream.end_tokens - num_tokens < num_left:  # no min, no max: this is the simulation's inner loop
                num_left = stream.end_tokens - num_tokens
            if sequence.num_computed % block_tokens > filled:
                filled = sequence.num_computed % block_tokens
            if num_tokens == sequence.num_prompt_tokens + 1:
                fresh.append(stream.job)
        num_steps = 1
        if not self.prompts and not plan.preempted:  # what was preempted may be admitted again at the next step
            num_steps = min(num_left, self.num_fitting())
            self._num_quiet = block_tokens - 1 - filled
        self.stretch = stretch = Stretch.of(step, now, num_steps, len(self.decoding), context, self._prompts_s(now))
        for job in fresh:
            job.second_token = stretch.end_of(1)
        return stretch

    def num_fitting(self) -> int:
        """Return how many steps of the stretch are sure to find blocks for all sequences of the batch."""
        available, count, block_tokens = self._books.pool.num_available, len(self.decoding), self._books.block_tokens
        if not count:
            return self._num_applied + 1
        if available >= count:
            return self._num_applied + 1 + available // count * block_tokens
        # The sequences' next blocks, the soonest first: that after the last available one ends the stretch.
        rooms = sorted(len(stream.own.block_table) * block_tokens - stream.own.num_tokens for stream in self.decoding)
        return self._num_applied + 1 + rooms[available]

    def catch_up(self, now: float) -> None:
        """Bring the books up to the steps that are over; the last one of a stretch is `end`'s."""
        if self.stretch is None:
            return
        num_steps = self.stretch.steps_begun(now) - 1
        if num_steps > max(self._num_quiet, self._num_applied):
            self._apply(num_steps, is_over=False)

    def end(self) -> Stretch:
        """Bring the books up to the end of the stretch, as far as it decodes, and return it."""
        stretch, self.stretch = self.stretch, None
        assert stretch is not None
        self._apply(stretch.num_steps, is_over=True)
        return stretch

    def _take(self, plan: StepPlan[SimulatedStream]) -> None:
        self.decoding, self.prompts = plan.decodes, plan.prompts
        firsts = [stream for stream in plan.decodes if not stream.own.num_output_tokens]
        if firsts:  # all but a token of their prompts was cached
            self.decoding = [stream for stream in plan.decodes if stream.own.num_output_tokens]
            self.prompts = [*(PlannedChunk(stream, 1) for stream in firsts), *plan.prompts]

    def _prompts_s(self, now: float) -> float:
        """Return what the prompt chunks add to the step that begins now."""
        seconds = 0.0
        for stream, num_tokens in self.prompts:
            seconds += self._profile.step.prefill_s(num_tokens, stream.own.num_computed)
            if stream.job.prefill_started is None:
                stream.job.prefill_started, stream.job.num_cached = now, stream.own.num_cached
        return seconds

    def _apply(self, num_steps: int, *, is_over: bool) -> None:
        """Note that so many steps of the stretch are over."""
        fresh, self._num_applied = num_steps - self._num_applied, num_steps
        if num_steps > self._num_quiet:
            self._apply_blocks(fresh, is_over=is_over)
            return
        for stream in self.decoding:
            sequence = stream.own
            sequence.num_tokens += fresh
            sequence.num_computed += fresh

    def _apply_blocks(self, fresh: int, *, is_over: bool) -> None:
        """Note so many further steps, and the blocks that they have filled and taken."""
        block_tokens = self._books.block_tokens
        for stream in self.decoding:
            sequence = stream.own
            sequence.num_tokens += fresh
            # After the last step the next plan takes the block for the last token.
            need = sequence.num_tokens - is_over
            if need > len(sequence.block_table) * block_tokens:
                missing = self._books.blocks_for(need) - len(sequence.block_table)
                sequence.block_table += self._books.pool.allocate(missing)
            self._books.advance(sequence, sequence.num_tokens - 1)
