"""Steps taken together are the steps one by one: same times, same blocks, same preemptions."""

from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BatonError
from engine.cache_log import CacheChange
from loadtest.content import Segment, content_id
from loadtest.simulator.decode import DecodeWorker
from loadtest.simulator.events import Timeline
from loadtest.simulator.job import Job
from loadtest.simulator.names import block_names
from loadtest.simulator.profile import Profile, load_profile
from loadtest.simulator.step_count import StepCount

PROFILE = load_profile("two-core-cpu").model_copy(
    update={"block_tokens": 4, "pool_blocks": 40, "running_max": 6, "decode_token_budget": 24, "waiting_max": 100}
)


@dataclass
class Seen:
    """What the worker tells, and a prefill worker that takes a fixed time."""

    timeline: Timeline
    log: list[tuple[float, str, int]] = field(default_factory=list)
    gaps: dict[int, tuple[float, ...]] = field(default_factory=dict)
    changes: list[CacheChange] = field(default_factory=list)
    worker: DecodeWorker | None = None

    def start_prefill(self, job: Job) -> None:
        self._note("prefill", job)
        job.prefill_started = self.timeline.now()
        self.timeline.after(0.05, partial(self._land, job))

    def _land(self, job: Job) -> None:
        assert self.worker is not None
        job.first_token = self.timeline.now()
        self.worker.land(job)

    def on_first_token(self, job: Job) -> None:
        self._note("first token", job)
        job.first_token = self.timeline.now()

    def on_finished(self, job: Job, gaps: tuple[float, ...]) -> None:
        self._note("finished", job)
        self.gaps[job.number] = gaps

    def on_failed(self, job: Job, error: BatonError) -> None:
        self._note(type(error).__name__, job)

    def on_load(self, worker: DecodeWorker) -> None:
        worker.books.pool.check()

    def _note(self, what: str, job: Job) -> None:
        self.log.append((self.timeline.now(), what, job.number))


@dataclass(frozen=True)
class Arrival:
    at: float
    content: int
    num_prompt: int
    num_output: int
    is_remote: bool


ARRIVALS = st.lists(
    st.builds(Arrival, st.floats(0, 3), st.integers(0, 3), st.integers(1, 70), st.integers(1, 60), st.booleans()),
    min_size=1,
    max_size=14,
)


def play(arrivals: list[Arrival], profile: Profile, stretch_max: int) -> tuple[Seen, DecodeWorker]:
    timeline = Timeline()
    seen = Seen(timeline)
    worker = seen.worker = DecodeWorker("decode-0", profile, timeline, seen, keeps_gaps=True, stretch_max=stretch_max)
    for number, arrival in enumerate(arrivals):
        prompt = Segment(content_id("prompt", arrival.content), arrival.num_prompt)
        answer = Segment(content_id("answer", number), arrival.num_output)
        count = (arrival.num_prompt + arrival.num_output - 1) // profile.block_tokens
        names = block_names((prompt, answer), profile.block_tokens, count)
        job = Job(
            number, number, 0, (prompt,), answer, names, arrival.num_prompt, 0.0, 0.0, is_remote=arrival.is_remote
        )
        timeline.at(arrival.at, partial(worker.add, job))
    timeline.run()
    worker.check_idle()
    return seen, worker


@given(ARRIVALS, st.sampled_from([24, 40, 400]), st.sampled_from([0.0, 0.05]))
@settings(max_examples=100, deadline=None)
def test_steps_taken_together_are_the_steps_one_by_one(
    arrivals: list[Arrival], pool_blocks: int, itl_target_s: float
) -> None:
    profile = PROFILE.model_copy(update={"pool_blocks": pool_blocks, "itl_target_s": itl_target_s})

    together, fast = play(arrivals, profile, 1 << 30)
    single, slow = play(arrivals, profile, 1)

    assert [entry[1:] for entry in together.log] == [entry[1:] for entry in single.log]
    assert [entry[0] for entry in together.log] == pytest.approx([entry[0] for entry in single.log])
    assert together.gaps.keys() == single.gaps.keys()
    for number, gaps in single.gaps.items():
        assert together.gaps[number] == pytest.approx(gaps)
    assert fast.num_preemptions == slow.num_preemptions
    assert fast.done.totals == pytest.approx(slow.done.totals)
    assert sorted(fast.books.pool.snapshot()[1]) == sorted(slow.books.pool.snapshot()[1])


def test_a_crowded_pool_preempts_as_the_real_scheduler_does_and_everyone_ends() -> None:
    arrivals = [Arrival(0.0, number, 20, 60, is_remote=number % 2 == 0) for number in range(6)]

    seen, worker = play(arrivals, PROFILE, 1 << 30)

    assert worker.num_preemptions > 0
    assert sorted(number for _, what, number in seen.log if what == "finished") == list(range(6))
    assert all(len(gaps) == 59 and min(gaps) > 0 for gaps in seen.gaps.values())


def test_what_a_pool_cannot_hold_is_refused_and_what_fills_it_ends_there() -> None:
    window = PROFILE.model_copy(update={"context_tokens": 200})

    refused, _ = play([Arrival(0.0, 0, 100, 90, is_remote=False)], PROFILE, 1 << 30)
    cut, _ = play([Arrival(0.0, 0, 100, 100, is_remote=False)], window, 1 << 30)

    assert [what for _, what, _ in refused.log] == ["InvalidRequestError"]
    assert len(cut.gaps[0]) == 40 * 4 - 100 - 1


def test_totals_count_what_real_workers_count() -> None:
    _, worker = play([Arrival(0.0, 0, 30, 5, is_remote=False)], PROFILE, 1 << 30)

    totals = worker.done.totals
    assert isinstance(worker.done, StepCount)
    assert (totals.steps, totals.prompt_tokens, totals.sequences) == (2 + 4, 30, 4)
