"""Every session is sent in its time, every request leaves one record, and conversations carry the real answers."""

import asyncio
from collections.abc import Sequence

import pytest

from common.errors import ConfigError, OverloadedError
from loadtest.arrivals import Arrival, ClosedArrival, ConstantArrival, TraceArrival
from loadtest.client import ClientRequest, ServedModel, StreamLog
from loadtest.content import Segment, TextPrompt, TokenPrompt, TokenRun
from loadtest.records import RequestRecord
from loadtest.runner import LoadRun, RunOptions
from loadtest.workload import Session, Turn

FAST = ConstantArrival(rate=10_000)


class ScriptedTarget:
    """Answers with token 7, except the request ids that it is told to refuse; notes who was there at once."""

    def __init__(self, refused: Sequence[str] = ()) -> None:
        self.seen: list[ClientRequest] = []
        self.most_at_once = 0
        self._refused = refused
        self._now = 0

    async def model(self) -> ServedModel:
        return ServedModel("scripted", 1024, 4096)

    async def generate(self, request: ClientRequest, log: StreamLog) -> None:
        self.seen.append(request)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        if request.request_id in self._refused:
            raise OverloadedError("full")
        log.token_ids += [7] * request.output_tokens
        log.add(request.output_tokens)

    async def close(self) -> None:
        """Nothing is open."""


def sessions(count: int, turns: int = 1, at: Sequence[float | None] = ()) -> list[Session]:
    return [
        Session(
            number,
            tuple(Turn(TokenPrompt((Segment(100 * number + turn, 4),)), 2) for turn in range(turns)),
            at[number] if at else None,
        )
        for number in range(count)
    ]


def run(
    target: ScriptedTarget,
    what: Sequence[Session],
    arrival: Arrival = FAST,
    options: RunOptions = RunOptions(),  # noqa: B008
) -> list[RequestRecord]:
    return asyncio.run(LoadRun(target, options).run(iter(what), arrival))


def test_every_request_leaves_one_record() -> None:
    records = run(ScriptedTarget(), sessions(5, turns=3))

    assert sorted((r.session, r.turn) for r in records) == [(s, t) for s in range(5) for t in range(3)]
    assert all(r.error is None and r.output_tokens == 2 for r in records)


def test_a_later_turn_sends_everything_said_before_with_the_real_answers() -> None:
    target = ScriptedTarget()

    run(target, sessions(1, turns=3))

    assert target.seen[2].prompt == TokenPrompt(
        (Segment(0, 4), TokenRun((7, 7)), Segment(1, 4), TokenRun((7, 7)), Segment(2, 4))
    )


def test_a_failed_request_is_a_record_and_ends_its_session_alone() -> None:
    records = run(ScriptedTarget(refused=["load-0-1-0"]), sessions(3, turns=2))

    assert sorted((r.session, r.turn, r.error) for r in records if r.session == 1) == [(1, 0, "OverloadedError")]
    assert len(records) == 5


def test_intended_times_are_those_of_the_arrivals() -> None:
    records = run(ScriptedTarget(), sessions(4), ConstantArrival(rate=50))

    assert [r.intended_s for r in sorted(records, key=lambda r: r.session)] == pytest.approx([0, 0.02, 0.04, 0.06])
    assert all(r.sent_s >= r.intended_s - 0.005 for r in records)


def test_trace_times_count_from_the_first_row_and_can_be_sped_up() -> None:
    records = run(ScriptedTarget(), sessions(3, at=[100.0, 100.5, 101.0]), TraceArrival(speedup=20))

    assert [r.intended_s for r in sorted(records, key=lambda r: r.session)] == pytest.approx([0, 0.025, 0.05])


def test_trace_arrivals_need_a_workload_with_times() -> None:
    with pytest.raises(ConfigError, match="timestamps"):
        run(ScriptedTarget(), sessions(1), TraceArrival())


def test_a_closed_loop_never_has_more_sessions_than_users() -> None:
    target = ScriptedTarget()

    records = run(target, sessions(20), ClosedArrival(users=3))

    assert len(records) == 20
    assert target.most_at_once == 3


def test_a_bound_on_sessions_in_flight_holds() -> None:
    target = ScriptedTarget()

    run(target, sessions(30), ConstantArrival(rate=1e9), RunOptions(inflight_max=2))

    assert target.most_at_once <= 2


def test_no_session_starts_after_the_duration() -> None:
    records = run(ScriptedTarget(), sessions(1000), ConstantArrival(rate=100), RunOptions(duration_s=0.055))

    assert len(records) == 6


def test_request_ids_are_unique_and_seeds_follow_the_session() -> None:
    target = ScriptedTarget()

    run(target, sessions(3, turns=2), options=RunOptions(seed=9))

    assert len({request.request_id for request in target.seen}) == 6
    assert {request.seed for request in target.seen} == {9, 10, 11}


def test_texts_continue_as_texts() -> None:
    target = ScriptedTarget()

    run(target, [Session(0, (Turn(TextPrompt("a"), 1), Turn(TextPrompt("b"), 1)))])

    assert target.seen[1].prompt == TextPrompt("ab")
