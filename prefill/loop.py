"""The prefill loop: owns the pool, the queue and every prompt's state; turns prompts into KV and a first token."""

import asyncio
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton_pb.v1 import worker_pb2
from common.clock import Clock
from common.config import PrefillConfig
from common.errors import BatonError, OverloadedError
from engine.engine import Engine
from engine.prefix_loader import PrefixLoader
from engine.sequence import Sequence
from engine.service import LoopLoad
from engine.step import ScheduledChunk, TokenOutput
from engine.step_runner import StepRunner, Work
from prefill.scheduler import Prompt, PromptScheduler

RETRY_AFTER_S = 1.0
"""What a refused caller is told."""


class PromptOwner(Protocol):
    """Who pushes a prompt's blocks. Both are plain functions, called from the loop."""

    def blocks_final(self, first: int, block_ids: Seq[int], layers: range) -> None:
        """`layers` of the prompt's blocks `first`.. are computed and will not change: read them until `release`."""
        ...

    def fail(self, error: BatonError) -> None:
        """The prompt will not be prefilled."""
        ...


class Prefilled(NamedTuple):
    """The outcome of a prompt. Seconds."""

    output: TokenOutput
    num_cached: int
    queue_s: float
    prefill_s: float
    device_s: float
    """This prompt's share of the steps."""


@dataclass(slots=True, eq=False, kw_only=True)
class PromptJob(Prompt):
    """A prompt in this loop. `prefilled` is for its owner to await; the rest is the loop's."""

    sequence: Sequence
    owner: PromptOwner
    prefilled: asyncio.Future[Prefilled]
    arrived_s: float
    num_tokens: int
    """Tokens to compute: all that it came with."""
    started_s: float | None = None
    num_final: int = 0
    """Leading blocks of which the owner was told all layers."""
    num_final_layers: int = 0
    """Leading layers of the further blocks that it was told of."""
    loading: Work | None = None
    """Brings blocks of its prefix into the pool."""


class PrefillLoop:
    """Runs prompts through the engine. Everything here is plain functions on one asyncio loop.

        submit ──► queued ──► prefilling ──► prefilled ──► release
                     └──────────── withdraw ─────────────────┘

    The owner of a job calls `release` exactly once, when nobody reads the job's blocks any more.
    """

    def __init__(
        self, worker_id: str, engine: Engine, loader: PrefixLoader, config: PrefillConfig, clock: Clock
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._loader = loader
        self._config = config
        self._clock = clock
        self._scheduler: PromptScheduler[PromptJob] = PromptScheduler(engine, config.token_budget)
        self._jobs: set[PromptJob] = set()
        self._planned: list[PromptJob] = []
        self._batch: list[ScheduledChunk] = []
        """The running step's chunks, one for each planned job."""
        self._listeners: list[Callable[[], None]] = []
        self._counters: Counter[str] = Counter()
        self._is_draining = False
        self._crash: BatonError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.runner = StepRunner(engine, self, worker_id, layer_owner=self)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return self._engine.blocks_for(num_tokens)

    def submit(
        self, sequence: Sequence, owner: PromptOwner, holder: worker_pb2.PrefixHolder | None = None
    ) -> PromptJob:
        """Queue a prompt.

        Args:
            sequence: the prompt.
            owner: who pushes its blocks.
            holder: who has blocks of it; they are fetched first, if that is possible.

        Raises:
            InvalidRequestError: it can never be served here; the message names need and limit.
            OverloadedError: the queue is full, or the worker drains.
            WorkerLostError: the loop has crashed.
        """
        if self._crash is not None:
            raise self._crash
        if self._is_draining:
            raise OverloadedError(f"worker {self._worker_id} is draining", RETRY_AFTER_S)
        self._engine.check_request(sequence.token_ids, sequence.sampling)
        waiting = self._scheduler.num_waiting
        if waiting >= self._config.waiting_max:
            raise OverloadedError(f"{waiting} prompts wait already, the limit of {self._worker_id}", RETRY_AFTER_S)
        prefilled: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        job = PromptJob(
            sequence=sequence,
            owner=owner,
            prefilled=prefilled,
            arrived_s=self._clock.now(),
            num_tokens=sequence.num_tokens,
        )
        self._jobs.add(job)
        self._idle.clear()
        self._scheduler.add(job)
        if self._loader.is_worthwhile(sequence, holder):
            job.is_loading = True
            job.loading = self.runner.spawn(self._load(job, holder), f"prefix-{sequence.request_id}")
        self.runner.wake()
        self._changed()
        return job

    def withdraw(self, job: PromptJob) -> None:
        """Compute no more of a prompt; `release` must still follow. Does nothing after it was prefilled."""
        self._scheduler.remove(job)
        if job.loading is not None:
            job.loading.cancel()
        if not job.prefilled.done():
            job.prefilled.cancel()
            self._counters["prompts_withdrawn_total"] += 1

    def release(self, job: PromptJob) -> None:
        """Let go of a job's blocks: kept where they hold a full block of the prompt, else free."""
        assert job in self._jobs
        self._jobs.discard(job)
        self.runner.release(job.sequence)
        if not self._jobs:
            self._idle.set()
        self._changed()

    def plan(self) -> list[ScheduledChunk]:
        """Return the next step's chunks; blocks found in the prefix cache go to the owners now."""
        chunks = self._scheduler.plan()
        self._planned = [chunk.prompt for chunk in chunks]
        for job in self._planned:
            if job.started_s is None:
                job.started_s = self._clock.now()
                self._counters["cached_tokens_total"] += job.sequence.num_cached
                self._tell_final(job)
        if chunks:
            self._changed()
        self._batch = [ScheduledChunk(chunk.prompt.sequence, chunk.num_tokens) for chunk in chunks]
        return self._batch

    def apply(self, batch: Seq[ScheduledChunk], outputs: Seq[TokenOutput | None]) -> None:
        """Take a step's results."""
        for job, chunk, output in zip(self._planned, batch, outputs, strict=True):
            if job.prefilled.done():
                continue  # withdrawn while the step ran
            if output is not None and output.error is not None:
                job.owner.fail(output.error)
                continue
            self._engine.complete(chunk, output)
            self._counters["prefilled_tokens_total"] += chunk.num_tokens
            self._tell_final(job)
            if output is not None:
                self._finish(job, output)
        self._planned, self._batch = [], []
        self._changed()

    def layer_marks(self, batch: Seq[ScheduledChunk]) -> tuple[int, ...]:
        """Divide the layers of a step with which a prompt ends: what other steps computed travels during the next."""
        if not any(chunk.reaches_end for chunk in batch):
            return ()
        layers, groups = self._engine.layout.num_layers, self._config.layer_groups
        return tuple(sorted({layers * group // groups for group in range(1, groups)} - {0}))

    def layers_final(self, num_layers: int) -> None:
        """Tell the owners of ending prompts, so that the tail that nothing hides is the last group of layers only."""
        for job, chunk in zip(self._planned, self._batch, strict=True):
            if chunk.reaches_end and not job.prefilled.done():
                self._tell(job, len(job.sequence.block_table), num_layers)

    def crashed(self, error: BatonError) -> None:
        """Fail every job."""
        self._crash = error
        for job in list(self._jobs):
            job.owner.fail(error)
        self._changed()

    def load(self) -> LoopLoad:
        """Return the load of this moment."""
        scheduler = self._scheduler
        waiting = scheduler.num_waiting
        return LoopLoad(
            scheduler.queued_tokens,
            waiting,
            len(self._jobs) - waiting,
            self._is_draining,
            self._counters + self._loader.counters,
            self.runner.count.to_pb(),
            self._loader.fetches,
        )

    def pool_changed(self) -> None:
        """Blocks came back, or a prefix came, from elsewhere: look at the queue again."""
        self.runner.wake()
        self._changed()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the load or the pool may have changed."""
        self._listeners.append(listener)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new prompts and wait for those here; return how many are left after `timeout_s`."""
        self._is_draining = True
        self._changed()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return len(self._jobs)

    async def close(self) -> None:
        """Stop stepping and wait for all tasks. All jobs have ended."""
        await self.runner.stop()

    def fail_all(self, error: BatonError) -> None:
        """Fail every job that is left, at an orderly stop."""
        for job in list(self._jobs):
            job.owner.fail(error)

    async def _load(self, job: PromptJob, holder: worker_pb2.PrefixHolder | None) -> None:
        try:
            await self._loader.load(job.sequence, holder)
        finally:
            job.is_loading = False
            self.pool_changed()

    def _tell_final(self, job: PromptJob) -> None:
        sequence = job.sequence
        is_whole = sequence.num_computed == job.num_tokens
        block_tokens = self._engine.block_tokens
        num_final = len(sequence.block_table) if is_whole else sequence.num_computed // block_tokens
        self._tell(job, num_final, self._engine.layout.num_layers)
        job.num_final, job.num_final_layers = num_final, 0

    def _tell(self, job: PromptJob, num_blocks: int, num_layers: int) -> None:
        """Tell a job's owner that the first layers of its first blocks are final."""
        block_ids, layers = (
            job.sequence.block_table[job.num_final : num_blocks],
            range(job.num_final_layers, num_layers),
        )
        if block_ids and layers:
            job.owner.blocks_final(job.num_final, block_ids, layers)
            job.num_final_layers = num_layers

    def _finish(self, job: PromptJob, output: TokenOutput) -> None:
        self._scheduler.remove(job)
        assert job.started_s is not None
        now = self._clock.now()
        self._counters["prompts_prefilled_total"] += 1
        job.prefilled.set_result(
            Prefilled(
                output,
                job.sequence.num_cached,
                job.started_s - job.arrived_s,
                now - job.started_s,
                job.sequence.prefill_device_s,
            )
        )

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()
