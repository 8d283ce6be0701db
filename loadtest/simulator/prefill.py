"""A prefill worker: queue, chunks under a token budget, steps by the cost model, pushes hidden behind compute.

The order is the real scheduler's (prefill/scheduler.py): least left to compute first, with ageing. It is modelled here,
not imported: the control plane knows workers by their messages only. What the cache holds of a waiting prompt is looked
up when it comes, not anew for each step.
"""

import heapq
from functools import partial
from typing import NamedTuple, Protocol

from common.errors import BatonError, OverloadedError
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.pool import SimulatedPool
from loadtest.simulator.profile import Profile
from loadtest.simulator.step_count import StepCount


class Link:
    """One worker's network: transfers go one after the other."""

    def __init__(self) -> None:
        self.free_at = 0.0


def transfer(sender: Link, receiver: Link, num_bytes: float, profile: Profile, now: float) -> float:
    """Occupy both links; return when the last byte is there."""
    end = max(now, sender.free_at, receiver.free_at) + num_bytes / profile.link.bytes_per_s
    sender.free_at = receiver.free_at = end
    return end


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


class _Chunk(NamedTuple):
    job: Job
    num_tokens: int


class PrefillWorker:
    """Owned by one simulation."""

    def __init__(
        self, worker_id: str, profile: Profile, timeline: Timeline, pool: SimulatedPool, events: PrefillEvents
    ) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.queued_tokens = 0
        self.done = StepCount()
        self._profile = profile
        self._timeline = timeline
        self._events = events
        self._queue: list[tuple[int, int, Job]] = []
        self._arrived_at: dict[Job, int] = {}
        self._num_scheduled = 0
        self._num_admitted = 0  # of those in the queue
        self._is_stepping = False

    @property
    def num_sequences(self) -> int:
        """Prompts waiting or being prefilled."""
        return len(self._arrived_at)

    def add(self, job: Job) -> None:
        """Queue a prompt, or refuse it when the queue is full or the pool too small."""
        if len(self._arrived_at) >= self._profile.waiting_max:
            self._events.on_failed(job, OverloadedError(f"{len(self._arrived_at)} prompts wait on {self.worker_id}"))
            return
        self._arrived_at[job] = self._num_scheduled
        self.queued_tokens += job.num_uncomputed
        self._push(job)
        self._events.on_load(self)
        self._step()

    def _push(self, job: Job) -> None:
        left = job.num_uncomputed
        if job.prefill_lease is None:
            left -= self.pool.match(job.reusable_names(self._profile.block_tokens)) * self._profile.block_tokens
        heapq.heappush(self._queue, (left + self._arrived_at[job], job.number, job))

    def _step(self) -> None:
        if self._is_stepping or not self._queue:
            return
        chunks = self._plan()
        if not chunks:
            return  # no room in the pool: the end of a push begins the next step
        seconds = self._profile.step.base_s + sum(
            self._profile.step.prefill_s(chunk.num_tokens, chunk.job.num_computed) for chunk in chunks
        )
        self._is_stepping = True
        self._timeline.after(seconds, lambda: self._finish(chunks, seconds))

    def _plan(self) -> list[_Chunk]:
        """Take the next chunks off the queue. With a full pool only prompts that have blocks go on."""
        chunks: list[_Chunk] = []
        shut_out: list[tuple[int, int, Job]] = []
        budget = self._profile.prefill_token_budget
        while self._queue and budget and (not shut_out or self._num_admitted):
            entry = heapq.heappop(self._queue)
            job = entry[2]
            if job.prefill_lease is None and (shut_out or not self._admit(job)):
                shut_out.append(entry)
                continue
            self._num_admitted -= 1
            num_tokens = min(budget, job.num_uncomputed)
            chunks.append(_Chunk(job, num_tokens))
            budget -= num_tokens
        for entry in shut_out:
            heapq.heappush(self._queue, entry)
        self._num_scheduled += self._profile.prefill_token_budget - budget
        return chunks

    def _admit(self, job: Job) -> bool:
        block_tokens = self._profile.block_tokens
        job.prefill_lease = self.pool.reserve(job.reusable_names(block_tokens), -(-job.num_prompt // block_tokens))
        if job.prefill_lease is None:
            return False
        job.num_computed = job.num_cached = len(job.prefill_lease.names) * block_tokens
        self.queued_tokens -= job.num_cached
        job.prefill_started = self._timeline.now()
        self._num_admitted += 1
        return True

    def _finish(self, chunks: list[_Chunk], seconds: float) -> None:
        self._is_stepping = False
        self.done.add_step(seconds)
        for job, num_tokens in chunks:
            self.done.add_chunk(num_tokens, job.num_computed)
            job.num_computed += num_tokens
            self.queued_tokens -= num_tokens
            assert job.prefill_lease is not None
            self.pool.seal(job.prefill_lease, job.computed_names(self._profile.block_tokens))
            pushed_at = self._announce(job)
            if job.num_uncomputed:
                self._num_admitted += 1
                self._push(job)
                continue
            del self._arrived_at[job]
            self._events.on_first_token(job)
            self._timeline.at(pushed_at + self._profile.link.latency_s, partial(self._pushed, job))
        self._events.on_load(self)
        self._step()

    def _announce(self, job: Job) -> float:
        """Send what is computed and not sent; return when its last byte is there."""
        fresh = max(0, job.num_computed - job.num_sent)
        job.num_sent += fresh
        sender, receiver = self._events.link_of(self.worker_id), self._events.link_of(job.decode_worker)
        if not fresh:
            return max(self._timeline.now(), sender.free_at)
        return transfer(sender, receiver, fresh * self._profile.kv_bytes_per_token, self._profile, self._timeline.now())

    def _pushed(self, job: Job) -> None:
        assert job.prefill_lease is not None
        self.pool.release(job.prefill_lease)
        self._events.on_pushed(job)
        self._step()
