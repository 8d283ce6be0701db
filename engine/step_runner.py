"""The heart of a worker's loop: plan, step, apply, for ever. Shared by prefill and decode, which own the plans."""

import asyncio
import logging
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from common.errors import BatonError, WorkerLostError
from engine.engine import Engine
from engine.sequence import Sequence
from engine.step import LayerWatch, ScheduledChunk, TokenOutput
from engine.step_count import StepCount

_logger = logging.getLogger(__name__)


class StepOwner(Protocol):
    """Who decides what is computed and what becomes of it. All three are plain functions on the asyncio loop."""

    def plan(self) -> list[ScheduledChunk]:
        """Return the next step's batch; empty: nothing to do until `wake`."""
        ...

    def apply(self, batch: Seq[ScheduledChunk], outputs: Seq[TokenOutput | None]) -> None:
        """Take the results of a step. Sequences may have left meanwhile."""
        ...

    def crashed(self, error: BatonError) -> None:
        """Fail everything that is under way: there will be no further step."""
        ...


class LayerOwner(Protocol):
    """An owner that uses layers before their step is over. Both are plain functions on the asyncio loop."""

    def layer_marks(self, batch: Seq[ScheduledChunk]) -> tuple[int, ...]:
        """Return after how many layers of this step it wants to be told; empty: not at all."""
        ...

    def layers_final(self, num_layers: int) -> None:
        """The first `num_layers` layers of the running step are in the pool. Comes before the step's `apply`."""
        ...


class Work:
    """A task of a worker.

    `cancel` takes effect once, and only after the coroutine has begun: so a `finally` around its first await always
    runs, and runs undisturbed.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        self._has_begun = False
        self._is_cancelled = False
        self.task = asyncio.create_task(self._run(coroutine), name=name)

    def cancel(self) -> None:
        """Cancel it; the second time and after its end, do nothing."""
        if not self._is_cancelled:
            self._is_cancelled = True
            if self._has_begun:
                self.task.cancel()

    async def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._has_begun = True
        if self._is_cancelled:
            self.task.cancel()  # reaches the coroutine at its first await
        await coroutine


class StepRunner:
    """Runs one owner's steps, one after another, on one thread of its own; keeps the worker's tasks.

    While a step computes, the asyncio loop goes on: results of the step before are sent, commands are taken, blocks are
    reserved. Only what the step itself uses waits for its end, see `release`. An unexpected exception, here or in a
    spawned task, is a crash: the owner fails its requests and `wait_failed` raises.
    """

    def __init__(self, engine: Engine, owner: StepOwner, worker_id: str, layer_owner: LayerOwner | None = None) -> None:
        self.count = StepCount()
        """What was computed."""
        self._engine = engine
        self._owner = owner
        self._layer_owner = layer_owner
        self._worker_id = worker_id
        self._thread = ThreadPoolExecutor(1, f"{worker_id}-step", initializer=engine.placement.take)
        self._wake = asyncio.Event()
        self._in_step: set[int] = set()
        self._leaving: list[Sequence] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(lambda future: future.exception())  # a crash may go unwatched
        self._main: asyncio.Task[None] | None = None

    @property
    def num_tasks(self) -> int:
        """Spawned tasks that are not done."""
        return len(self._tasks)

    def start(self) -> None:
        """Begin to run steps."""
        assert self._main is None
        self._main = asyncio.create_task(self._run(), name=f"{self._worker_id}-loop")

    def wake(self) -> None:
        """Say that there may be something to plan."""
        self._wake.set()

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back to the pool: now, or after the running step if it uses them."""
        if id(sequence) in self._in_step:
            self._leaving.append(sequence)
            return
        blocks, sequence.block_table = sequence.block_table, []
        sequence.num_computed = 0
        self._engine.pool.release(blocks)
        self.wake()

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> Work:
        """Run a task of this worker; an exception other than cancellation is a crash."""
        work = Work(coroutine, name)
        self._tasks.add(work.task)
        work.task.add_done_callback(self._task_done)
        return work

    async def wait_failed(self) -> None:
        """Return after `stop`; raise as soon as the loop has crashed.

        Raises:
            WorkerLostError: with the crash as its cause.
        """
        await asyncio.shield(self._outcome)

    async def stop(self) -> None:
        """Run no further step, wait for the running one and for all tasks. The owner has ended its requests."""
        self._is_stopping = True
        self.wake()
        if self._main is not None:
            await asyncio.wait([self._main])
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._thread.shutdown()
        if not self._outcome.done():
            self._outcome.set_result(None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._is_stopping:
                self._wake.clear()
                batch = self._owner.plan()
                if not batch:
                    await self._wake.wait()
                    continue
                self._in_step = {id(chunk.sequence) for chunk in batch}
                began, amounts = loop.time(), self.count.begin(batch)
                outputs = await loop.run_in_executor(self._thread, self._engine.step, batch, self._watch(loop, batch))
                self._in_step = set()
                seconds = loop.time() - began
                self.count.end(amounts, seconds)
                self._engine.took(sum(chunk.num_tokens for chunk in batch), seconds)
                _charge(batch, seconds)
                self._owner.apply(batch, outputs)
                self._let_go()
        except Exception as error:  # the loop's outermost frame: whatever it is, the worker is done
            self._in_step = set()
            self._crash(error)
            self._let_go()

    def _watch(self, loop: asyncio.AbstractEventLoop, batch: Seq[ScheduledChunk]) -> LayerWatch | None:
        owner = self._layer_owner
        if owner is None or not (marks := owner.layer_marks(batch)):
            return None
        # The loop runs its calls in the order in which threads made them: these before the end of the step.
        return LayerWatch(marks, lambda num_layers: loop.call_soon_threadsafe(owner.layers_final, num_layers))

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            self.release(sequence)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    def _crash(self, cause: BaseException) -> None:
        if self._outcome.done():
            return
        fields = {"worker_id": self._worker_id, "error": repr(cause)}
        _logger.error("the loop crashed", exc_info=cause, extra={"fields": fields})
        error = WorkerLostError(f"worker {self._worker_id} crashed: {cause!r}")
        error.__cause__ = cause
        self._is_stopping = True
        self._outcome.set_exception(error)
        self._owner.crashed(error)
        self.wake()


def _charge(batch: Seq[ScheduledChunk], seconds: float) -> None:
    """Share a step's seconds among its sequences, by their tokens in it."""
    each = seconds / sum(chunk.num_tokens for chunk in batch)
    for sequence, num_tokens in batch:
        if num_tokens == 1 and sequence.num_computed >= sequence.num_prompt_tokens:
            sequence.decode_device_s += each
        else:
            sequence.prefill_device_s += each * num_tokens
