"""The decode scheduler admits in order, never exceeds its limits, and everyone ends however small the pool is."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from decode.chunk_budget import LEAST_TOKENS, TRIAL_TOKENS
from decode.scheduler import DecodeScheduler, Phase, PlannedChunk, StepPlan, Stream
from engine.fake import FakeEngine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk, TokenOutput


@dataclass(slots=True, eq=False, kw_only=True)
class TextStream(Stream):
    sequence: Sequence


def stream_of(name: str, length: int, max_tokens: int = 8, is_remote: bool = False, start: int = 0) -> TextStream:
    token_ids = [(start + i) % 1000 for i in range(length)]
    sequence = Sequence.start(name, token_ids, length, SamplingParams(max_tokens=max_tokens), 4)
    return TextStream(sequence=sequence, is_remote=is_remote)


class Bench:
    """A scheduler, and an engine that computes nothing but keeps the books."""

    def __init__(
        self,
        num_blocks: int = 100,
        running_max: int = 8,
        token_budget: int = 16,
        itl_target_s: float | None = None,
    ) -> None:
        self.engine = FakeEngine(num_blocks=num_blocks)
        self.scheduler: DecodeScheduler[TextStream] = DecodeScheduler(
            self.engine, running_max, token_budget, itl_target_s
        )

    def step(self) -> StepPlan[TextStream]:
        """Plan, compute, and let finished streams leave."""
        plan = self.scheduler.plan()
        for stream, num_tokens in plan.chunks:
            chunk = ScheduledChunk(stream.sequence, num_tokens)
            self.engine.complete(chunk, TokenOutput(7, None, []) if chunk.reaches_end else None)
            if self.engine.finish_reason(stream.sequence) is not None:
                self.leave(stream)
        return plan

    def land(self, stream: TextStream) -> None:
        """What a landing does: the first token comes by message, then the KV."""
        stream.sequence.append(7, 4)
        if self.engine.finish_reason(stream.sequence) is not None:
            self.leave(stream)
            return
        self.engine.advance(stream.sequence, stream.sequence.num_tokens - 1)
        self.scheduler.join(stream)

    def leave(self, stream: TextStream) -> None:
        self.scheduler.remove(stream)
        self.engine.pool.release(stream.sequence.block_table)


def names(plan: StepPlan[TextStream]) -> list[tuple[str, int]]:
    return [(stream.sequence.request_id, num_tokens) for stream, num_tokens in plan.chunks]


def test_prompt_chunks_ride_along_with_decodes_under_the_budget() -> None:
    bench = Bench(token_budget=10)
    for name, length, start in (("a", 4, 0), ("b", 20, 100), ("c", 5, 200)):
        bench.scheduler.add(stream_of(name, length, start=start))
    bench.scheduler.admit()

    assert names(bench.step()) == [("a", 4), ("c", 5), ("b", 1)]
    assert names(bench.step()) == [("a", 1), ("c", 1), ("b", 8)]
    assert names(bench.step()) == [("a", 1), ("c", 1), ("b", 8)]


def test_a_long_prompt_is_overtaken_only_until_as_much_was_computed() -> None:
    bench = Bench(num_blocks=500, running_max=50, token_budget=8)
    bench.scheduler.add(long := stream_of("long", 40, max_tokens=1))
    overtakers = 0
    while long.phase is not Phase.ENDED:
        bench.scheduler.add(stream_of(f"short-{overtakers}", 8, max_tokens=1, start=50 * overtakers + 50))
        bench.scheduler.admit()
        bench.step()
        overtakers += 1

    assert overtakers <= 2 * 40 // 8 + 1


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(12, 40),
    seats=st.integers(2, 6),
    extra=st.integers(0, 10),
    length=st.integers(2, 30),
    arrivals=st.lists(st.lists(st.integers(1, 20), max_size=3), min_size=1, max_size=6),
)
def test_however_many_come_after_it_a_stream_is_admitted_prefilled_and_decoded_to_its_end(
    num_blocks: int, seats: int, extra: int, length: int, arrivals: list[list[int]]
) -> None:
    bench = Bench(num_blocks, running_max=seats, token_budget=seats + extra)
    bench.scheduler.add(it := stream_of("it", length, max_tokens=12, start=900))
    steps = 0
    while it.phase is not Phase.ENDED:
        for number, each in enumerate(arrivals[steps % len(arrivals)]):  # for ever
            bench.scheduler.add(stream_of(f"{steps}.{number}", each, max_tokens=10, start=steps * 20 + number * 7))
        bench.scheduler.admit()
        plan = bench.step()
        steps += 1

        assert it not in plan.preempted  # it is the oldest
        assert steps <= 4 * length + 20


def test_beside_decodes_a_chunk_is_as_long_as_the_target_allows() -> None:
    bench = Bench(num_blocks=500, token_budget=400, itl_target_s=0.1)
    bench.scheduler.add(decoding := stream_of("decodes", 4, max_tokens=100))
    bench.scheduler.admit()
    assert names(bench.step()) == [("decodes", 4)]
    bench.scheduler.add(prompted := stream_of("prompt", 900, max_tokens=1, start=100))
    bench.scheduler.admit()

    assert names(bench.step()) == [("decodes", 1), ("prompt", TRIAL_TOKENS)]
    decode, prompt = PlannedChunk(decoding, 1), PlannedChunk(prompted, 100)
    bench.scheduler.ran([decode], 0.05)
    bench.scheduler.ran([decode, prompt], 0.1)
    assert names(bench.step()) == [("decodes", 1), ("prompt", 100)]
    for _ in range(30):
        bench.scheduler.ran([decode], 0.2)
    assert names(bench.step()) == [("decodes", 1), ("prompt", LEAST_TOKENS)]


def test_no_more_are_admitted_than_may_run() -> None:
    bench = Bench(running_max=3)
    for number in range(5):
        bench.scheduler.add(stream_of(str(number), 4, is_remote=number % 2 == 0, start=number * 50))

    assert [stream.sequence.request_id for stream in bench.scheduler.admit()] == ["0", "2"]
    assert len(bench.scheduler.running) == 1
    assert len(bench.scheduler.waiting) == 2


def test_a_landing_reuses_even_the_last_full_block_but_a_local_prefill_computes_its_last_token() -> None:
    bench = Bench()
    bench.scheduler.add(first := stream_of("first", 8, max_tokens=2))
    bench.scheduler.admit()
    bench.step()
    bench.step()
    assert first.phase is Phase.ENDED

    bench.scheduler.add(remote := stream_of("remote", 8, is_remote=True))
    bench.scheduler.add(local := stream_of("local", 8))
    bench.scheduler.admit()

    assert remote.first_block == 2
    assert (local.first_block, local.sequence.num_computed, local.cached_tokens) == (1, 4, 4)


def test_the_youngest_is_preempted_and_comes_back_before_all_that_wait() -> None:
    bench = Bench(num_blocks=6, running_max=2)
    bench.scheduler.add(old := stream_of("old", 7, max_tokens=12))
    bench.scheduler.add(young := stream_of("young", 7, max_tokens=12, start=100))
    bench.scheduler.add(stream_of("waits", 1, start=200))
    bench.scheduler.admit()

    preempted: list[TextStream] = []
    while not preempted:
        bench.scheduler.admit()
        preempted = bench.step().preempted

    assert preempted == [young]
    assert bench.scheduler.waiting[0] is young
    assert (old.phase, young.phase) == (Phase.RUNNING, Phase.WAITING)
    assert young.sequence.num_output_tokens > 0
    assert young.sequence.block_table == []


def test_what_cannot_fit_is_refused_with_need_and_limit() -> None:
    bench = Bench(num_blocks=6)

    bench.scheduler.check_fits(20, None)
    bench.scheduler.check_fits(20, 4)
    with pytest.raises(InvalidRequestError, match="need 7 blocks, the pool has 6"):
        bench.scheduler.check_fits(20, 5)


@settings(max_examples=80, deadline=None)
@given(
    num_blocks=st.integers(8, 30),
    running_max=st.integers(1, 6),
    token_budget=st.integers(1, 12),
    step_s=st.one_of(st.none(), st.floats(0.001, 1)),
    requests=st.lists(
        st.tuples(st.integers(1, 16), st.integers(1, 15), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12
    ),
    moves=st.lists(st.sampled_from(["step", "land", "abandon"]), max_size=60),
)
def test_limits_hold_and_everyone_ends(
    num_blocks: int,
    running_max: int,
    token_budget: int,
    step_s: float | None,
    requests: list[tuple[int, int, bool, int]],
    moves: list[str],
) -> None:
    bench = Bench(num_blocks, running_max, token_budget, None if step_s is None else 0.1)
    streams = [
        stream_of(str(number), length, max_tokens, is_remote, start)
        for number, (length, max_tokens, is_remote, start) in enumerate(requests)
    ]
    for stream in streams:
        bench.scheduler.add(stream)

    for _ in range(2000):
        if all(stream.phase is Phase.ENDED for stream in streams):
            break
        bench.scheduler.admit()
        move = moves.pop(0) if moves else "land"
        if move == "land" and bench.scheduler.landing:
            bench.land(bench.scheduler.landing[0])
        elif move == "abandon" and bench.scheduler.landing:
            bench.leave(bench.scheduler.landing[0])
        else:
            plan = bench.step()
            assert sum(num_tokens for _, num_tokens in names(plan)) <= token_budget
            assert len(plan.chunks) <= running_max
            bench.scheduler.ran(plan.chunks, step_s or 0.0)
        bench.engine.pool.check()

    assert all(stream.phase is Phase.ENDED for stream in streams)
    assert bench.engine.pool.num_used == 0
