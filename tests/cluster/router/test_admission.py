"""Who waits, in which order, who is refused or shed: fair to tenants, kind to high classes, and nobody starves."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.admission import RETRY_MAX_S, SHARES, Admission, Forecast
from cluster.router.class_queue import QUANTUM_TOKENS, Claim
from cluster.service_level import Priority, ServiceLevel
from common.errors import OverloadedError

PATIENCE_S, TOKENS_PER_S = 5.0, 1000.0
COST_MAX = 4000


def claim(key: str, tenant: str = "t", priority: Priority = Priority.NORMAL, cost: int = 100, **more: Any) -> Claim:
    level = ServiceLevel(priority, more.pop("ttft", None), more.pop("tpot", None))
    return Claim(key, tenant, level, cost, **more)


def admission(queue_max: int = 10_000, wait_max_s: float = 1e9) -> Admission:
    return Admission(queue_max, PATIENCE_S, wait_max_s)


def drained(queue: Admission, now_s: float = 0.0) -> list[str]:
    order = []
    while queue.head() is not None:
        head = queue.head()
        taken = queue.take(now_s)
        assert taken is head
        order.append(taken.key)
    return order


def steady(queue: Admission, now_s: float) -> float:
    """Let the queue drain 1,000 tokens a second for a while, so that it can predict; it ends as it was."""
    queue.join(claim("before", cost=500), now_s, None)
    for number in range(10):
        queue.join(claim(f"before-{number}", cost=500), now_s, None)
        queue.take(now_s)
        now_s += 0.5
    queue.take(now_s)
    return now_s


# Order.


def test_the_nearer_deadline_goes_first_among_a_tenants_requests() -> None:
    queue = admission()
    queue.join(claim("none"), 0.0, None)
    queue.join(claim("target", ttft=2.0), 0.1, None)
    queue.join(claim("deadline", deadline_s=1.5), 0.2, None)

    assert drained(queue) == ["deadline", "target", "none"]


def test_a_request_without_a_target_is_not_overtaken_for_longer_than_the_patience() -> None:
    queue = admission()
    queue.join(claim("old"), 0.0, None)
    queue.join(claim("early", ttft=0.1), PATIENCE_S - 0.2, None)
    queue.join(claim("late", ttft=0.1), PATIENCE_S, None)

    assert drained(queue) == ["early", "old", "late"]


def test_tenants_share_by_tokens_not_by_requests() -> None:
    queue, tokens = admission(), Counter[str]()
    for number in range(400):
        queue.join(claim(f"small-{number}", "small", cost=100), 0.0, None)
        queue.join(claim(f"large-{number}", "large", cost=2000), 0.0, None)

    while sum(tokens.values()) < 60_000:
        taken = queue.take(0.0)
        tokens[taken.tenant] += taken.cost_tokens

    assert abs(tokens["small"] - tokens["large"]) <= 2 * QUANTUM_TOKENS + 2000


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    queue = admission()
    for number in range(1000):
        queue.join(claim(f"flood-{number}", "flood"), 0.0, None)
    queue.join(claim("single", "quiet"), 1.0, None)

    assert drained(queue).index("single") <= QUANTUM_TOKENS / 100


def test_a_higher_class_overtakes_at_once() -> None:
    queue = admission()
    for key, priority in (("low", Priority.LOW), ("normal", Priority.NORMAL), ("high", Priority.HIGH)):
        queue.join(claim(key, priority=priority), 0.0, None)

    assert drained(queue) == ["high", "normal", "low"]


def test_higher_classes_get_more_and_the_lowest_gets_its_share() -> None:
    queue, tokens = admission(), Counter[Priority]()
    for number in range(1000):
        for priority in Priority:
            queue.join(claim(f"{priority}-{number}", priority=priority), 0.0, None)

    for _ in range(1000):
        taken = queue.take(0.0)
        tokens[taken.level.priority] += taken.cost_tokens

    above = 0
    for priority in Priority:
        if above:
            assert tokens[priority] == pytest.approx(above * SHARES[priority], abs=300)
        above += tokens[priority]


def test_a_request_that_lost_its_worker_goes_first_and_is_not_refused() -> None:
    queue = admission(queue_max=1)
    queue.join(claim("high", priority=Priority.HIGH), 0.0, None)

    assert queue.join(claim("again", is_admitted=True, ttft=0.1), 0.0, Forecast(9.0, 9.0, 9.0, TOKENS_PER_S)) == []
    assert drained(queue) == ["again", "high"]


Arrivals = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.sampled_from(Priority),
        st.integers(300, COST_MAX),
        st.sampled_from([None, 0.01, 1.0, 60.0]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(Arrivals, st.sampled_from(Priority), st.sampled_from(["a", "victim"]), st.data())
def test_nobody_starves_under_any_arrivals(
    pattern: list[tuple[str, Priority, int, float | None, int]], priority: Priority, tenant: str, data: st.DataObject
) -> None:
    """For each one served, the pattern adds others for ever: more arrive than can be served, in any order."""
    queue, now, number = admission(), 0.0, 0
    before = data.draw(st.integers(0, 30))

    def arrive() -> None:
        nonlocal number
        who, level, cost, target, more = pattern[number % len(pattern)]
        for copy in range(more):
            queue.join(claim(f"{number}.{copy}", who, level, cost, ttft=target), now, None)
        number += 1

    for _ in range(before):
        arrive()
    queue.join(claim("watched", tenant, priority, COST_MAX), now, None)
    # Ahead of it in its own tenant: who is there, and whoever arrives in its patience. Six others take turns with it.
    arrivals = 3 * (before + PATIENCE_S * TOKENS_PER_S / 300)
    own = (arrivals + 1) * COST_MAX
    limit_s = 8 * (own + 2 * QUANTUM_TOKENS) / TOKENS_PER_S * (1 + 1 / SHARES[priority])

    while True:
        taken = queue.take(now)
        if taken.key == "watched":
            break
        now += taken.cost_tokens / TOKENS_PER_S
        assert now < limit_s
        arrive()


# Bounds, shedding, refusals.


def test_a_full_queue_refuses_and_says_when_there_will_be_room() -> None:
    queue = admission(queue_max=2)
    now = steady(queue, 0.0)
    queue.join(claim("a", cost=3000), now, None)
    queue.join(claim("b", cost=3000), now, None)

    with pytest.raises(OverloadedError, match="2 requests wait, the most that may") as caught:
        queue.join(claim("c"), now, None)

    assert caught.value.retry_after_s == pytest.approx(6.0, rel=0.3)
    assert len(queue) == 2


def test_overload_sheds_the_lowest_class_first_and_never_a_higher_one() -> None:
    queue = admission(queue_max=3)
    for key, priority in (("low", Priority.LOW), ("normal", Priority.NORMAL), ("high", Priority.HIGH)):
        queue.join(claim(key, priority=priority), 0.0, None)

    shed = [out.key for key in "xy" for out in queue.join(claim(key, priority=Priority.HIGH), 0.0, None)]

    assert shed == ["low", "normal"]


def test_without_anybody_lower_a_high_request_is_refused() -> None:
    queue = admission(queue_max=2)
    queue.join(claim("a", priority=Priority.HIGH), 0.0, None)
    queue.join(claim("b", priority=Priority.HIGH), 0.0, None)

    for priority in Priority:
        with pytest.raises(OverloadedError):
            queue.join(claim("c", priority=priority), 0.0, None)


def test_a_tenant_that_fills_the_queue_makes_room_for_another() -> None:
    queue = admission(queue_max=10)
    for number in range(10):
        queue.join(claim(f"flood-{number}", "flood"), float(number), None)

    shed = queue.join(claim("first", "quiet"), 10.0, None)

    assert [out.key for out in shed] == ["flood-9"]
    with pytest.raises(OverloadedError):
        queue.join(claim("more", "flood"), 10.0, None)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(Priority), st.integers(1, 500), st.booleans()), max_size=80
    ),
    st.integers(1, 8),
)
def test_the_queue_is_bounded_and_nobody_is_lost(
    arrivals: list[tuple[str, Priority, int, bool]], queue_max: int
) -> None:
    queue, waiting, retries = admission(queue_max), dict[str, Claim](), list[float]()
    for number, (tenant, priority, cost, leaves) in enumerate(arrivals):
        new = claim(str(number), tenant, priority, cost)
        try:
            shed = queue.join(new, float(number), None)
        except OverloadedError as error:
            assert len(waiting) == queue_max
            retries.append(error.retry_after_s)
            assert all(other.level.priority <= priority for other in waiting.values())
        else:
            waiting[new.key] = new
            for out in shed:
                assert out.level.priority >= priority
                del waiting[out.key]
        if leaves and waiting:
            gone = queue.leave(next(iter(waiting)))
            assert gone is waiting.pop(next(iter(waiting)))
        assert {kept.key for kept in queue} == set(waiting)
        assert len(queue) <= queue_max

    assert all(0 < retry_s <= RETRY_MAX_S for retry_s in retries)
    assert sorted(drained(queue)) == sorted(waiting)
    assert queue.next_end_s is None
    assert queue.leave("0") is None


def test_targets_that_cannot_be_met_are_refused_at_once_with_the_time_when_they_could() -> None:
    queue = admission()
    now = steady(queue, 0.0)
    queue.join(claim("ahead", cost=3000, ttft=0.5), now, None)

    with pytest.raises(OverloadedError, match=r"first token would come after 3\..*asked 1 s") as late:
        queue.join(claim("a", ttft=1.0), now, Forecast(0.5, 0.01, 0.0, TOKENS_PER_S))
    with pytest.raises(OverloadedError, match=r"a token would take 0\.200 s, asked 0\.1 s") as slow:
        queue.join(claim("b", tpot=0.1), now, Forecast(0.5, 0.2, 7.0, TOKENS_PER_S))
    queue.join(claim("c", ttft=4.0, tpot=0.3), now, Forecast(0.5, 0.2, 7.0, TOKENS_PER_S))

    assert late.value.retry_after_s == pytest.approx(2.5, rel=0.3)
    assert slow.value.retry_after_s == 7.0


def test_a_deadline_nearer_than_the_wait_is_refused_at_once() -> None:
    queue = admission()
    now = steady(queue, 0.0)
    queue.join(claim("ahead", cost=3000, ttft=0.5), now, None)

    with pytest.raises(OverloadedError, match="its deadline is nearer"):
        queue.join(claim("a", deadline_s=now + 1.0), now, None)
    queue.join(claim("b", deadline_s=now + 9.0), now, None)


def test_a_wait_beyond_the_limit_is_refused_before_it_begins() -> None:
    queue = admission(wait_max_s=10.0)
    now = steady(queue, 0.0)
    for number in range(2):
        queue.join(claim(str(number), cost=4000), now, None)

    with pytest.raises(OverloadedError, match=r"it would wait 1\d\.\d s, the most is 10 s"):
        queue.join(claim("d", cost=4000), now, None)


def test_waiting_ends_at_the_deadline_or_the_longest_wait() -> None:
    queue = admission(wait_max_s=10.0)
    queue.join(claim("long"), 0.0, None)
    queue.join(claim("short", deadline_s=3.0), 0.0, None)

    assert queue.next_end_s == 3.0
    assert [gone.key for gone in queue.expired(3.0)] == ["short"]
    assert queue.next_end_s == 10.0
    assert queue.expired(9.9) == []
    assert [gone.key for gone in queue.expired(10.0)] == ["long"]
    assert queue.next_end_s is None


def test_nothing_is_predicted_from_an_idle_cluster() -> None:
    queue = admission()
    for number in range(10):
        queue.join(claim(str(number)), 100.0 * number, None)
        queue.take(100.0 * number)

    queue.join(claim("y"), 1000.0, None)
    assert queue.wait_s(claim("x"), 1000.0) is None
