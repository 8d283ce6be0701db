"""No tenant gets more than its rules allow over any stretch of time, and what it is told to wait is what it must."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_pb.v1 import common_pb2
from cluster.tenants.callers import ANONYMOUS, Caller
from cluster.tenants.key_file import TenantRules
from cluster.tenants.quotas import Bucket, QuotaError, RequestUse, TenantUse, Uses
from common.clock import ManualClock
from common.errors import InvalidRequestError, WorkerLostError


def rules(**given: object) -> TenantRules:
    return TenantRules.model_validate({"cache": "shared", **given})


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 20)), max_size=60),
    st.floats(0.1, 50),
    st.floats(1, 50),
)
def test_a_bucket_never_gives_more_than_its_burst_and_what_came_in(
    steps: list[tuple[float, float]], rate: float, burst: float
) -> None:
    bucket, now, taken = Bucket(), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if amount <= burst and not bucket.take(amount, now, rate, burst):
            taken += amount
        assert taken <= burst + now * rate + 1e-6


@given(st.floats(0.1, 50), st.floats(1, 50), st.floats(0, 100))
def test_after_the_wait_that_a_bucket_names_the_amount_is_there(rate: float, burst: float, overdrawn: float) -> None:
    bucket = Bucket()
    bucket.take(burst, 0.0, rate, burst)
    bucket.spend(overdrawn)

    wait_s = bucket.take(burst, 0.0, rate, burst)

    assert wait_s > 0
    assert bucket.take(burst, 0.99 * wait_s, rate, burst) > 0
    assert bucket.take(burst, wait_s + 1e-6, rate, burst) == 0


def test_calls_beyond_the_rate_are_refused_with_the_time_to_wait() -> None:
    clock = ManualClock()
    use, allowed = TenantUse("acme", clock), rules(requests_per_s=2)

    use.call(allowed)
    use.call(allowed)
    with pytest.raises(QuotaError, match="tenant acme may have 2 calls a second") as raised:
        use.call(allowed)
    assert raised.value.retry_after_s == pytest.approx(0.5)
    clock.advance(raised.value.retry_after_s)
    use.call(allowed)

    assert use.refusals == {"requests_per_s": 1}


def test_less_than_a_call_a_second_is_still_a_call() -> None:
    use, allowed = TenantUse("acme", ManualClock()), rules(requests_per_s=0.1)

    use.call(allowed)
    with pytest.raises(QuotaError) as raised:
        use.call(allowed)

    assert raised.value.retry_after_s == pytest.approx(10)


def test_as_many_requests_run_and_wait_as_may() -> None:
    use, allowed = TenantUse("acme", ManualClock()), rules(concurrent_max=2, queued_max=1)
    with ExitStack() as running:
        running.enter_context(use.request(allowed))
        running.enter_context(use.request(allowed))
        with pytest.raises(QuotaError, match="2 requests at once"), use.request(allowed):
            pass
        with use.queueing(allowed), pytest.raises(QuotaError, match="1 requests that wait"), use.queueing(allowed):
            pass

    assert (use.running, use.queued, use.requests_total) == (0, 0, 2)
    assert use.refusals == {"concurrent_max": 1, "queued_max": 1}
    with use.request(allowed), use.queueing(allowed):
        assert (use.running, use.queued) == (1, 1)


def test_output_tokens_count_as_they_come_and_delay_the_next_prompt() -> None:
    clock = ManualClock()
    use, allowed = TenantUse("acme", clock), rules(tokens_per_min=60)
    with use.request(allowed) as request:
        request.prompt(50)
        request.took(70)

    with use.request(allowed) as request:
        with pytest.raises(QuotaError, match="60 tokens a minute") as raised:
            request.prompt(10)
        assert raised.value.retry_after_s == pytest.approx(70)
        clock.advance(70)
        request.prompt(10)


def _charge(use: TenantUse, allowed: TenantRules, tokens: int, error: Exception | None) -> None:
    def work(request: RequestUse) -> None:
        request.prompt(50)
        request.took(tokens)
        if error is not None:
            raise error

    try:
        with use.request(allowed) as request:
            work(request)
    except WorkerLostError:
        pass


@pytest.mark.parametrize(
    ("tokens", "error", "is_given_back"),
    [
        pytest.param(0, WorkerLostError("gone"), True, id="the cluster failed"),
        pytest.param(1, WorkerLostError("gone"), False, id="it failed after a token"),
        pytest.param(0, None, False, id="the client left"),
    ],
)
def test_a_prompt_is_given_back_only_when_the_cluster_failed_it(
    tokens: int, error: Exception | None, is_given_back: bool
) -> None:
    use, allowed = TenantUse("acme", ManualClock()), rules(tokens_per_min=60)
    _charge(use, allowed, tokens, error)

    with use.request(allowed) as request:
        if is_given_back:
            request.prompt(60)
        else:
            with pytest.raises(QuotaError):
                request.prompt(60)


def test_a_prompt_that_can_never_be_allowed_is_no_question_of_time() -> None:
    use = TenantUse("acme", ManualClock())
    with use.request(rules(tokens_per_min=60)) as request, pytest.raises(InvalidRequestError, match="61 tokens"):
        request.prompt(61)
    with use.request(rules(prompt_tokens_max=9)) as request, pytest.raises(InvalidRequestError, match="at most 9"):
        request.prompt(10)


def test_tenants_are_counted_apart() -> None:
    uses = Uses(ManualClock())
    one, two = (Caller(name, "0" * 12, False, rules()) for name in ("one", "two"))

    with uses.of(one).request(one.rules) as request:
        request.took(5)
        request.finished(common_pb2.Usage(prompt_tokens=7, cached_tokens=3, output_tokens=5))
    with uses.of(two).request(two.rules):
        pass

    first, second = uses.all()
    assert (first.name, first.prompt_tokens, first.cached_tokens, first.output_tokens) == ("one", 7, 3, 5)
    assert (second.name, second.requests_total, second.output_tokens) == ("two", 1, 0)


def test_in_a_gateway_that_is_nearly_full_no_tenant_keeps_others_out() -> None:
    uses, most = Uses(ManualClock()), 8
    greedy, modest, third = (Caller(name, "0" * 12, False, rules()) for name in ("greedy", "modest", "third"))
    running: list[Caller] = []

    with ExitStack() as stack:

        def start(caller: Caller) -> bool:
            if len(running) == most:
                return False
            with ExitStack() as attempt:
                attempt.enter_context(uses.of(caller).request(caller.rules))
                try:
                    uses.check_share(caller, len(running) + 1, most)
                except QuotaError:
                    return False
                stack.enter_context(attempt.pop_all())
                running.append(caller)
                return True

        assert [start(greedy) for _ in range(8)] == [True] * 6 + [False] * 2
        assert start(modest)
        assert not start(greedy)
        assert start(third)
        assert uses.of(greedy).refusals == {"share": 3}


def test_requests_without_keys_fill_a_gateway() -> None:
    uses = Uses(ManualClock())
    with ExitStack() as stack:
        for number in range(8):
            stack.enter_context(uses.of(ANONYMOUS).request(ANONYMOUS.rules))
            uses.check_share(ANONYMOUS, number + 1, 8)
