"""Steps run one after another; blocks in use wait for the step; a crash is told to everybody."""

import asyncio
import math
import threading
from collections.abc import Sequence as Seq

import pytest

from common.errors import BatonError, WorkerLostError
from engine.fake import FakeEngine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk, TokenOutput
from engine.step_runner import StepRunner

LIMIT_S = 10.0


class OneSequence:
    """Decodes one sequence until it is taken away."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.sequence = Sequence.start("r", [1, 2, 3], 3, SamplingParams(), 4)
        self.sequence.block_table = engine.pool.allocate(8)
        self.is_running = True
        self.error: BatonError | None = None
        self.applied = asyncio.Event()

    def plan(self) -> list[ScheduledChunk]:
        return [ScheduledChunk(self.sequence, self.sequence.num_uncomputed)] if self.is_running else []

    def apply(self, batch: Seq[ScheduledChunk], outputs: Seq[TokenOutput | None]) -> None:
        self.applied.set()
        if self.is_running:
            self.engine.complete(batch[0], outputs[0])

    def crashed(self, error: BatonError) -> None:
        self.error = error


def test_blocks_of_a_running_step_are_released_after_it() -> None:
    async def main() -> None:
        loop, entered, flow = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def on_step(batch: Seq[ScheduledChunk]) -> None:
            loop.call_soon_threadsafe(entered.set)
            assert flow.wait(LIMIT_S)

        engine = FakeEngine(num_blocks=16, on_step=on_step)
        owner = OneSequence(engine)
        runner = StepRunner(engine, owner, "w")
        runner.start()
        await asyncio.wait_for(entered.wait(), LIMIT_S)
        owner.is_running = False
        runner.release(owner.sequence)
        assert engine.pool.num_used == 8
        flow.set()
        await asyncio.wait_for(owner.applied.wait(), LIMIT_S)
        await runner.stop()

        assert engine.pool.num_used == 0
        await runner.wait_failed()

    asyncio.run(main())


def test_a_step_runs_while_the_results_of_the_one_before_are_handled() -> None:
    """Each waits for the other: neither would end if one had to be over before the other begins."""

    async def main() -> None:
        loop, entered, handled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        num_steps = 0

        def on_step(batch: Seq[ScheduledChunk]) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 2:
                loop.call_soon_threadsafe(entered.set)
                assert handled.wait(LIMIT_S)

        async def handle() -> None:
            await asyncio.wait_for(entered.wait(), LIMIT_S)
            handled.set()

        class Handling(OneSequence):
            def apply(self, batch: Seq[ScheduledChunk], outputs: Seq[TokenOutput | None]) -> None:
                self.is_running = num_steps == 1
                if self.is_running:
                    runner.spawn(handle(), "handles the first step's results")
                    self.engine.complete(batch[0], outputs[0])
                else:
                    self.applied.set()

        engine = FakeEngine(num_blocks=16, on_step=on_step)
        owner = Handling(engine)
        runner = StepRunner(engine, owner, "w")
        runner.start()
        await asyncio.wait_for(owner.applied.wait(), LIMIT_S)
        await runner.stop()

        assert (num_steps, handled.is_set()) == (2, True)
        assert owner.error is None

    asyncio.run(main())


def test_what_a_block_costs_is_learned_from_steps_that_computed_one() -> None:
    async def main() -> None:
        engine = FakeEngine(num_blocks=16)
        owner = OneSequence(engine)
        owner.sequence.token_ids += range(10, 15)
        runner = StepRunner(engine, owner, "w")
        assert engine.block_s == math.inf
        runner.start()
        await asyncio.wait_for(owner.applied.wait(), LIMIT_S)
        owner.is_running = False
        await runner.stop()

        assert 0 < engine.block_s < LIMIT_S
        known = engine.block_s
        engine.took(3, 1e6)
        assert engine.block_s == known

    asyncio.run(main())


def test_a_crash_of_a_step_or_a_task_reaches_owner_and_watcher() -> None:
    async def fail() -> None:
        raise KeyError("surprise")

    async def main() -> None:
        engine = FakeEngine()
        owner = OneSequence(engine)
        owner.is_running = False
        runner = StepRunner(engine, owner, "w")
        runner.start()
        runner.spawn(fail(), "fails")
        with pytest.raises(WorkerLostError, match="surprise"):
            await asyncio.wait_for(runner.wait_failed(), LIMIT_S)
        await runner.stop()

        assert isinstance(owner.error, WorkerLostError)

    asyncio.run(main())


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_cancelled_task_always_reaches_its_finally_and_only_once(is_at_once: bool) -> None:
    async def main() -> None:
        cleaned, began = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.set()

        engine = FakeEngine()
        owner = OneSequence(engine)
        owner.is_running = False
        runner = StepRunner(engine, owner, "w")
        runner.start()
        running = runner.spawn(work(), "work")
        if not is_at_once:
            await began.wait()
        running.cancel()
        await began.wait()
        running.cancel()
        await runner.stop()

        assert cleaned.is_set()
        assert runner.num_tasks == 0

    asyncio.run(main())
