"""A prefill worker: the real scheduler over real books, steps by the cost model, pushes hidden behind compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from common.errors import BatonError
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.profile import Profile
from loadtest.simulator.worker import Link, SimulatedWorker, transfer
from prefill.scheduler import PlannedChunk, Prompt, PromptScheduler


class PrefillEvents(Protocol):
    """Who is told of a prefill worker's doings."""

    def on_first_token(self, job: Job) -> None:
        """The first token was sampled."""
        ...

    def on_failed(self, job: Job, error: BatonError) -> None:
        """The request was refused."""
        ...

    def on_load(self, worker: "PrefillWorker") -> None:
        """The load has changed."""
        ...

    def on_pushed(self, job: Job) -> None:
        """All KV has landed at the decode worker."""
        ...

    def link_of(self, worker_id: str) -> Link:
        """Return a worker's link."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _SimulatedPrompt(Prompt):
    job: Job


_Chunks = Sequence[PlannedChunk[_SimulatedPrompt]]


class PrefillWorker(SimulatedWorker):
    """Owned by one simulation.

    add ──► scheduler ──step by step──► first token ──last push──► blocks released
    """

    def __init__(self, worker_id: str, profile: Profile, timeline: Timeline, events: PrefillEvents) -> None:
        super().__init__(worker_id, profile)
        self._timeline = timeline
        self._events = events
        self._scheduler: PromptScheduler[_SimulatedPrompt] = PromptScheduler(self.books, profile.prefill_token_budget)
        self._num_pushing = 0
        self._is_stepping = False

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute."""
        return self._scheduler.queued_tokens

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Prompts with blocks, those that are only pushed still among them."""
        return self._scheduler.num_admitted + self._num_pushing

    def add(self, job: Job) -> None:
        """Queue a prompt, or refuse it when the queue is full or the pool too small."""
        try:
            self.books.check_prompt_fits(job.num_prompt)
            self._check_queue(self._scheduler.num_waiting)
        except BatonError as error:
            self._events.on_failed(job, error)
            return
        self._scheduler.add(_SimulatedPrompt(self._sequence(job), job=job))
        self._events.on_load(self)
        self._step()

    def _step(self) -> None:
        if self._is_stepping:
            return
        chunks = self._scheduler.plan()
        if not chunks:
            return  # no room in the pool: the end of a push begins the next step
        now, step = self._timeline.now(), self._profile.step
        seconds = step.base_s
        for prompt, num_tokens in chunks:
            sequence = prompt.sequence
            if prompt.job.prefill_started is None:
                prompt.job.prefill_started = now
                prompt.job.num_cached = sequence.num_cached
            seconds += step.prefill_s(num_tokens, sequence.num_computed)
        self._is_stepping = True
        self._timeline.after(seconds, lambda: self._finish(chunks, seconds))

    def _finish(self, chunks: _Chunks, seconds: float) -> None:
        self._is_stepping = False
        self.done.add_step(seconds)
        for prompt, num_tokens in chunks:
            sequence, job = prompt.sequence, prompt.job
            self.done.add_chunk(num_tokens, sequence.num_computed)
            self.books.advance(sequence, sequence.num_computed + num_tokens)
            pushed_at = self._announce(job, sequence.num_computed)
            if sequence.num_uncomputed:
                continue
            self._scheduler.remove(prompt)
            self._num_pushing += 1
            self._events.on_first_token(job)
            self._timeline.at(pushed_at + self._profile.link.latency_s, partial(self._pushed, prompt))
        self._step()
        self._events.on_load(self)

    def _announce(self, job: Job, num_computed: int) -> float:
        """Send what is computed and not sent; return when its last byte is there."""
        fresh = max(0, num_computed - job.num_sent)
        job.num_sent += fresh
        if not fresh:
            return max(self._timeline.now(), self.link.free_at)
        receiver = self._events.link_of(job.decode_worker)
        num_bytes = fresh * self._profile.kv_bytes_per_token
        return transfer(self.link, receiver, num_bytes, self._profile, self._timeline.now())

    def _pushed(self, prompt: _SimulatedPrompt) -> None:
        self._num_pushing -= 1
        self.books.pool.release(prompt.sequence.block_table)
        self._events.on_pushed(prompt.job)
        self._step()
