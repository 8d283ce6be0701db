"""The prefill scheduler packs prompts under the budget, short work first, and nobody starves."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fake import FakeEngine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk, TokenOutput
from prefill.scheduler import PlannedChunk, Prompt, PromptScheduler

SEEN: TokenOutput = TokenOutput(1, None, [])


@dataclass(slots=True, eq=False)
class TextPrompt(Prompt):
    sequence: Sequence


def prompt_of(name: str, length: int, start: int = 0) -> TextPrompt:
    token_ids = [(start + i) % 1000 for i in range(length)]
    return TextPrompt(Sequence.start(name, token_ids, length, SamplingParams(), 4))


class Bench:
    """A scheduler, and an engine that computes nothing but keeps the books."""

    def __init__(self, token_budget: int, num_blocks: int = 1000) -> None:
        self.engine = FakeEngine(num_blocks=num_blocks)
        self.scheduler: PromptScheduler[TextPrompt] = PromptScheduler(self.engine, token_budget)
        self.token_budget = token_budget

    def step(self) -> list[tuple[str, int]]:
        """Run one step; prompts that are done leave at once and give their blocks back."""
        chunks = self.scheduler.plan()
        for chunk in chunks:
            self._complete(chunk)
        return [(chunk.prompt.sequence.request_id, chunk.num_tokens) for chunk in chunks]

    def _complete(self, planned: PlannedChunk[TextPrompt]) -> None:
        sequence = planned.prompt.sequence
        chunk = ScheduledChunk(sequence, planned.num_tokens)
        is_done = chunk.reaches_end
        self.engine.complete(chunk, SEEN if is_done else None)
        if is_done:
            self.scheduler.remove(planned.prompt)
            self.engine.pool.release(sequence.block_table)


@pytest.mark.parametrize(
    ("budget", "lengths", "want"),
    [
        pytest.param(10, [], [[]], id="nothing to do"),
        pytest.param(10, [4], [[("0", 4)], []], id="one prompt in one step"),
        pytest.param(10, [25], [[("0", 10)], [("0", 10)], [("0", 5)]], id="a long prompt in chunks"),
        pytest.param(10, [3, 4, 3], [[("0", 3), ("2", 3), ("1", 4)], []], id="several prompts in one step"),
        pytest.param(
            10, [16, 3], [[("1", 3), ("0", 7)], [("0", 9)]], id="the short one first, the rest of the budget is used"
        ),
        pytest.param(10, [12, 12], [[("0", 10)], [("0", 2), ("1", 8)], [("1", 4)]], id="a begun prompt is finished"),
    ],
)
def test_a_step_holds_the_shortest_work_up_to_the_budget(
    budget: int, lengths: list[int], want: list[list[tuple[str, int]]]
) -> None:
    bench = Bench(budget)
    for number, length in enumerate(lengths):
        bench.scheduler.add(prompt_of(str(number), length, start=100 * number))

    assert [bench.step() for _ in want] == want


def test_a_long_prompt_is_not_overtaken_for_ever() -> None:
    bench = Bench(token_budget=10)
    bench.scheduler.add(prompt_of("long", 100))

    finished_after = 0
    for number in range(100):
        bench.scheduler.add(prompt_of(f"short {number}", 10, start=number))
        finished_after += any(name == "long" for name, _ in bench.step())

    # Prompts that come before 100 tokens are computed overtake it; then it is its turn.
    assert finished_after == 10


@settings(max_examples=100, deadline=None)
@given(
    budget=st.integers(1, 20),
    length=st.integers(1, 60),
    before=st.lists(st.integers(1, 30), max_size=4),
    arrivals=st.lists(st.lists(st.integers(1, 30), max_size=3), min_size=1, max_size=8),
)
def test_what_comes_after_as_much_as_a_prompt_has_left_was_computed_never_goes_before_it(
    budget: int, length: int, before: list[int], arrivals: list[list[int]]
) -> None:
    bench = Bench(budget)
    for number, each in enumerate(before):
        bench.scheduler.add(prompt_of(f"before {number}", each, start=number * 31))
    bench.scheduler.add(prompt_of("it", length, start=500))
    computed, left, num_steps = 0, length, 0
    while left:
        is_late = computed >= length
        for each in arrivals[num_steps % len(arrivals)]:  # for ever
            bench.scheduler.add(prompt_of(f"{'late' if is_late else 'early'} {computed}", each, start=computed))
        num_steps += 1
        chunks = bench.step()
        computed += sum(num_tokens for _, num_tokens in chunks)
        left -= sum(num_tokens for name, num_tokens in chunks if name == "it")

        assert left == 0 or not any(name.startswith("late") for name, _ in chunks)


def test_a_prompt_admitted_late_reuses_what_the_one_before_it_computed() -> None:
    bench = Bench(token_budget=20)
    bench.scheduler.add(prompt_of("first", 20))
    bench.scheduler.add(prompt_of("same", 20))

    assert bench.step() == [("first", 20)]
    assert bench.step() == [("same", 4)]  # all but the block with the last token


def test_a_long_prompt_of_which_little_is_new_goes_before_a_shorter_one() -> None:
    bench = Bench(token_budget=20)
    bench.scheduler.add(prompt_of("first", 60))
    while bench.step():
        pass
    bench.scheduler.add(prompt_of("short", 16, start=500))
    bench.scheduler.add(prompt_of("known", 60))

    assert bench.step() == [("known", 4), ("short", 16)]


def test_what_is_computed_meanwhile_for_others_brings_a_prompt_forward() -> None:
    bench = Bench(token_budget=20)
    for name, length, start in (("first", 20, 0), ("middle", 30, 500), ("follower", 40, 0)):
        bench.scheduler.add(prompt_of(name, length, start))

    assert [bench.step() for _ in range(3)] == [[("first", 20)], [("follower", 20)], [("middle", 20)]]


def test_a_prompt_that_finds_no_blocks_waits_and_holds_back_those_behind_it() -> None:
    bench = Bench(token_budget=8, num_blocks=6)
    held = bench.engine.pool.allocate(3)
    for name, length, start in (("large", 16, 0), ("small", 4, 500)):
        bench.scheduler.add(prompt_of(name, length, start))
    bench.scheduler.add(prompt_of("larger", 17, 700))

    assert bench.step() == [("small", 4)]
    assert bench.step() == []
    bench.engine.pool.release(held)
    assert bench.step() == [("large", 8)]


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(1, 40),
    num_blocks=st.integers(16, 60),
    arrivals=st.lists(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), max_size=4), max_size=12),
)
def test_never_over_budget_and_everyone_finishes(
    budget: int, num_blocks: int, arrivals: list[list[tuple[int, int]]]
) -> None:
    bench = Bench(budget, num_blocks)
    names = 0
    finished: dict[str, int] = {}
    total = 0
    steps = 0
    while arrivals or bench.scheduler.queued_tokens:
        for length, start in arrivals.pop(0) if arrivals else []:
            bench.scheduler.add(prompt_of(str(names), length, start))
            names += 1
            total += length
        chunks = bench.step()
        steps += 1
        assert sum(num_tokens for _, num_tokens in chunks) <= budget
        assert chunks or not bench.scheduler.queued_tokens
        for name, num_tokens in chunks:
            finished[name] = finished.get(name, 0) + num_tokens
        bench.engine.pool.check()

    assert len(finished) == names
    assert bench.scheduler.num_waiting == bench.scheduler.num_admitted == 0
    assert bench.engine.pool.num_used == 0
    assert steps <= total + 13  # at least a token in every step
