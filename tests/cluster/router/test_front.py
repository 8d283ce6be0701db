"""The router's door: workers get what they can do and a little more, the rest waits, and nobody is forgotten."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.router.front import Asked, Front
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.least_loaded import LeastLoaded
from cluster.router.policies.policy import Choice
from cluster.router.policies.registry import POLICIES
from cluster.router.question import Question
from cluster.router.router import Router
from cluster.router.worker import Role, WorkerFacts, WorkerInfo, WorkerLoad
from cluster.service_level import ORDINARY, Priority, ServiceLevel
from common.clock import ManualClock
from common.config import RouterConfig
from common.errors import BatonError, OverloadedError, WorkerLostError

RUNNING_MAX = 4
ROOM = RUNNING_MAX + 1
"""Sequences that a worker gets: one may wait for a place."""


class Door:
    """A front over a router whose decode workers run four sequences each, and what it answered."""

    def __init__(self, *infos: WorkerInfo, policy: str = "cost", config: RouterConfig | None = None) -> None:
        self.clock = ManualClock()
        self.router = Router(POLICIES[policy](), Random(0), self.clock)
        self.front = Front(self.router, config or RouterConfig())
        self.answers: dict[str, Reservation | BatonError] = {}
        self.infos = infos or (WorkerInfo("d0", "h:1", Role.DECODE),)
        self.router.set_workers(self.infos)
        for info in self.infos:
            running_max = 0 if info.role is Role.PREFILL else RUNNING_MAX
            self.router.welcome(info.worker_id, WorkerFacts(1, "m", "l", 16, b"", 10_000, 8192, running_max))
            self.router.report(info.worker_id, WorkerLoad())

    def ask(self, key: str, level: ServiceLevel = ORDINARY, tenant: str = "", **more: float | bool) -> bool:
        request = PlacementRequest(key, 100, 50, ttft_target_s=level.ttft_target_s, tpot_target_s=level.tpot_target_s)
        return self.front.ask(Asked(key, request, tenant, level, **more), self.answer(key))  # type: ignore[arg-type]

    def answer(self, key: str) -> Callable[[Reservation | BatonError], None]:
        def take(answer: Reservation | BatonError) -> None:
            assert key not in self.answers
            self.answers[key] = answer

        return take

    def first_token(self, key: str) -> None:
        reservation = self.answers[key]
        assert isinstance(reservation, Reservation)
        reservation.first_token()
        self.front.pump()

    def release(self, key: str) -> None:
        reservation = self.answers[key]
        assert isinstance(reservation, Reservation)
        reservation.release()
        self.front.pump()

    def error(self, key: str) -> BatonError:
        error = self.answers[key]
        assert isinstance(error, BatonError)
        return error

    def placed(self) -> list[str]:
        return [key for key, answer in self.answers.items() if isinstance(answer, Reservation)]

    def worker_of(self, key: str) -> str:
        reservation = self.answers[key]
        assert isinstance(reservation, Reservation)
        assert reservation.placement is not None
        return reservation.placement.decode.worker_id


def test_what_a_worker_can_do_is_placed_at_once_and_the_rest_waits_its_turn() -> None:
    door = Door()
    waits = [door.ask(f"r{number}") for number in range(ROOM + 2)]

    assert waits == [False] * ROOM + [True] * 2
    door.release("r0")
    assert door.placed() == [f"r{number}" for number in range(ROOM + 1)]
    door.release("r1")
    assert door.front.num_waiting == 0
    assert len(door.placed()) == ROOM + 2


def test_nine_hundred_long_requests_of_one_tenant_cost_another_one_place() -> None:
    door = Door()
    for number in range(900):
        long = PlacementRequest(f"long{number}", 4000, 2000)
        door.front.ask(Asked(long.request_id, long, "heavy"), door.answer(long.request_id))
    assert door.ask("short", tenant="light")

    door.release("long0")

    assert door.placed()[-1] == "short"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_full_worker_is_not_chosen_while_another_has_room(policy: str) -> None:
    door = Door(*(WorkerInfo(f"d{number}", f"h:{number}", Role.DECODE) for number in range(3)), policy=policy)
    door.router.report("d0", WorkerLoad(running_sequences=RUNNING_MAX, waiting_sequences=2))

    for number in range(2 * ROOM):
        assert door.ask(f"r{number}") is False

    assert {door.worker_of(f"r{number}") for number in range(2 * ROOM)} == {"d1", "d2"}
    assert door.ask("one more") is True
    door.router.report("d0", WorkerLoad())
    door.front.pump()
    assert door.worker_of("one more") == "d0"


def test_who_was_seen_to_start_waits_no_more_although_the_worker_has_not_reported_since() -> None:
    door = Door()
    for number in range(ROOM):
        door.ask(f"r{number}")
    door.router.report("d0", WorkerLoad(running_sequences=1, waiting_sequences=ROOM - 1))

    for number in range(ROOM - 1):
        door.first_token(f"r{number}")
    assert door.ask("one more") is True
    door.release("r0")

    assert "one more" in door.placed()
    assert door.ask("and another") is True


def test_those_that_were_preempted_fill_a_worker_until_it_reports_again() -> None:
    door = Door()
    for number in range(ROOM):
        door.ask(f"r{number}")
        door.first_token(f"r{number}")
    door.router.report("d0", WorkerLoad(running_sequences=2, waiting_sequences=ROOM - 2))
    door.release("r0")

    assert door.ask("one more") is True
    door.router.report("d0", WorkerLoad(running_sequences=4))
    door.front.pump()
    assert "one more" in door.placed()


def test_what_is_on_its_way_counts_although_a_report_does_not_know_of_it_yet() -> None:
    door = Door()
    for number in range(ROOM):
        door.ask(f"r{number}")
    door.router.report("d0", WorkerLoad())

    assert door.ask("one more") is True


def test_a_prefill_worker_gets_one_prompt_ahead_and_then_by_its_seconds() -> None:
    prefill, decode = WorkerInfo("p0", "h:1", Role.PREFILL), WorkerInfo("d0", "h:2", Role.DECODE)
    door = Door(prefill, decode, policy="least_loaded")
    worker = door.router.workers.get("p0")
    assert worker is not None
    worker.candidate.model = worker.candidate.model._replace(token_s=0.05)

    waits = [door.ask(f"r{number}") for number in range(3)]

    assert waits == [False, False, True]  # each takes five seconds
    first = door.answers["r0"]
    assert isinstance(first, Reservation)
    first.first_token()
    door.front.pump()
    assert "r2" in door.placed()


def test_a_higher_class_overtakes_and_a_lower_one_is_shed_when_the_queue_is_full() -> None:
    door = Door(config=RouterConfig(queue_max=2))
    for number in range(ROOM):
        door.ask(f"running-{number}")
    for key in ("low-1", "low-2"):
        door.ask(key, ServiceLevel(Priority.LOW))

    door.ask("high", ServiceLevel(Priority.HIGH))

    error = door.error("low-2")
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s > 0
    door.release("running-0")
    assert door.placed()[-1] == "high"
    assert door.router.counters["shed_total"] == 1


def test_when_all_are_full_and_the_queue_too_the_refusal_says_when_to_come_back() -> None:
    door = Door(config=RouterConfig(queue_max=1))
    for number in range(ROOM + 1):
        door.ask(f"r{number}")

    assert door.ask("late") is False
    assert isinstance(door.error("late"), OverloadedError)
    assert door.error("late").retry_after_s > 0


def test_a_target_that_cannot_be_met_is_refused_although_there_is_room() -> None:
    door = Door()

    door.ask("a", ServiceLevel(ttft_target_s=1e-4))
    door.ask("b", ServiceLevel(tpot_target_s=1e-5))
    door.ask("c", ServiceLevel(ttft_target_s=60.0, tpot_target_s=1.0))

    assert isinstance(door.error("a"), OverloadedError)
    assert isinstance(door.error("b"), OverloadedError)
    assert door.placed() == ["c"]
    assert door.router.num_reservations == 1


def test_asking_for_targets_takes_nobody_elses_turn() -> None:
    door = Door(*(WorkerInfo(f"d{number}", f"h:{number}", Role.DECODE) for number in range(2)), policy="round_robin")

    for number in range(6):
        door.ask(f"r{number}", ServiceLevel(ttft_target_s=60.0))

    workers = [door.worker_of(f"r{number}") for number in range(6)]
    assert workers.count("d0") == workers.count("d1") == 3


def test_a_request_that_lost_its_worker_is_placed_next_whatever_it_asked_for() -> None:
    door = Door(config=RouterConfig(queue_max=1))
    for number in range(ROOM + 1):
        door.ask(f"r{number}")

    assert door.ask("again", ServiceLevel(ttft_target_s=1e-4), is_admitted=True) is True
    door.release("r0")
    assert door.placed()[-1] == "again"


class Recorder(LeastLoaded):
    """Notes the targets that it is asked for."""

    def __init__(self) -> None:
        self.targets_s: list[float | None] = []

    def choose(self, question: Question, rng: Random) -> Choice:
        self.targets_s.append(question.ttft_target_s)
        return super().choose(question, rng)


def test_what_a_request_waited_is_taken_off_its_target() -> None:
    door = Door()
    door.router.policy = recorder = Recorder()
    for number in range(ROOM):
        door.ask(f"r{number}")
    door.ask("late", ServiceLevel(ttft_target_s=60.0))

    door.clock.advance(20.0)
    door.release("r0")

    assert door.placed()[-1] == "late"
    assert recorder.targets_s == [None] * ROOM + [40.0]


def test_a_withdrawn_request_gets_no_answer() -> None:
    door = Door()
    for number in range(ROOM + 1):
        door.ask(f"r{number}")

    assert door.front.withdraw(f"r{ROOM}") is True
    assert door.front.withdraw(f"r{ROOM}") is False
    door.release("r0")
    assert f"r{ROOM}" not in door.answers


def test_who_waits_until_its_deadline_or_the_longest_wait_is_refused() -> None:
    door = Door(config=RouterConfig(queue_wait_max_s=10.0))
    for number in range(ROOM):
        door.ask(f"r{number}")
    door.ask("long")
    door.ask("short", timeout_s=3.0)

    assert door.front.next_end_s == 3.0
    for seconds, key in ((3.0, "short"), (7.0, "long")):
        door.clock.advance(seconds)
        door.front.expire()
        assert isinstance(door.error(key), OverloadedError)
    assert door.front.next_end_s is None


def test_a_full_worker_that_leaves_takes_its_fullness_with_it() -> None:
    door = Door(*(WorkerInfo(f"d{number}", f"h:{number}", Role.DECODE) for number in range(2)))
    for number in range(2 * ROOM):
        door.ask(f"r{number}")
    assert door.ask("waits") is True

    door.router.set_workers(door.infos[:1])
    for number in range(2 * ROOM):
        door.release(f"r{number}")

    door.front.check()
    assert door.worker_of("waits") == "d0"


def test_when_the_last_worker_is_lost_those_that_wait_hear_of_it() -> None:
    door = Door()
    for number in range(ROOM + 1):
        door.ask(f"r{number}")

    door.router.lose("d0", "gone")
    door.front.pump()

    assert isinstance(door.error(f"r{ROOM}"), WorkerLostError)


class AnyTraffic(RuleBasedStateMachine):
    """Requests come, end, give up; workers fill, empty and are lost. Nobody is forgotten or answered twice."""

    @initialize(queue_max=st.integers(1, 6))
    def begin(self, queue_max: int) -> None:
        infos = [WorkerInfo(f"d{number}", f"h:{number}", Role.DECODE) for number in range(2)]
        infos.append(WorkerInfo("p0", "h:9", Role.PREFILL))
        config = RouterConfig(queue_max=queue_max, queue_wait_max_s=30.0)
        self.door, self.queue_max = Door(*infos, config=config), queue_max
        self.asked: list[str] = []
        self.withdrawn: set[str] = set()
        self.returning: set[str] = set()

    @rule(
        tenant=st.sampled_from("ab"),
        priority=st.sampled_from(Priority),
        ttft_s=st.sampled_from([None, 0.5, 30.0]),
        timeout_s=st.sampled_from([None, 5.0]),
        is_admitted=st.booleans(),
    )
    def ask(
        self, tenant: str, priority: Priority, ttft_s: float | None, timeout_s: float | None, is_admitted: bool
    ) -> None:
        key = f"r{len(self.asked)}"
        self.asked.append(key)
        if is_admitted:
            self.returning.add(key)
        more = {} if timeout_s is None else {"timeout_s": timeout_s}
        self.door.ask(key, ServiceLevel(priority, ttft_s), tenant, is_admitted=is_admitted, **more)

    @rule(index=st.integers(0, 200))
    def release(self, index: int) -> None:
        placed = self.door.placed()
        if placed:
            self.door.release(placed[index % len(placed)])

    @rule(index=st.integers(0, 200))
    def withdraw(self, index: int) -> None:
        if self.asked:
            key = self.asked[index % len(self.asked)]
            if self.door.front.withdraw(key):
                self.withdrawn.add(key)

    @rule(worker=st.sampled_from(["d0", "d1"]), waiting=st.integers(0, 4))
    def report(self, worker: str, waiting: int) -> None:
        self.door.router.report(worker, WorkerLoad(waiting_sequences=waiting))
        self.door.front.pump()

    @rule(worker=st.sampled_from(["d0", "d1", "p0"]))
    def lose(self, worker: str) -> None:
        self.door.router.lose(worker, "gone")
        self.door.front.pump()

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.door.clock.advance(seconds)
        self.door.front.expire()

    @invariant()
    def everybody_is_answered_waits_or_has_left(self) -> None:
        front = self.door.front
        front.check()
        answered = set(self.door.answers)
        assert not answered & self.withdrawn
        assert len(answered) + len(self.withdrawn) + front.num_waiting == len(self.asked)
        assert front.num_waiting <= self.queue_max + len(self.returning)
        assert not front.num_waiting or not self.door.router.has_room()

    def teardown(self) -> None:
        if not hasattr(self, "door"):
            return
        for key in self.door.placed():
            self.door.release(key)
        for key in self.door.placed():
            self.door.release(key)
        while self.door.front.num_waiting:
            self.door.clock.advance(30.0)
            self.door.front.expire()
        for key in self.door.placed():
            self.door.release(key)
        assert self.door.router.num_reservations == 0
        self.door.front.check()


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
