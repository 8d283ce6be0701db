"""What a token is expected to take follows what tokens have taken; failures count, and nothing is slow forever."""

import pytest

from cluster.router.token_time import TokenTime

START = 1e-5


def test_what_comes_first_is_believed() -> None:
    time = TokenTime(START)
    assert time.token_s(0.0) == START

    time.came(10_000, 10.0, 1.0)

    assert time.token_s(1.0) == pytest.approx(1e-3)


def test_one_disturbed_transfer_changes_little_and_a_slower_link_is_followed() -> None:
    time = TokenTime(START)
    time.came(1000, 1e-2, 0.0)

    time.came(1000, 10.0, 1.0)
    assert time.token_s(1.0) < 1.5e-5

    for second in range(60):
        time.came(1000, 1.0, 2.0 + second)
    assert time.token_s(61.0) == pytest.approx(1e-3, rel=0.05)


def test_transfers_that_were_hidden_bring_it_down_to_nothing_and_it_rises_again() -> None:
    time = TokenTime(START)
    for _ in range(200):
        time.came(1000, 0.0, 0.0)
    assert time.token_s(0.0) < 1e-9

    for _ in range(100):
        time.came(1000, 0.1, 0.0)
    assert time.token_s(0.0) == pytest.approx(1e-4, rel=0.05)


def test_a_failure_says_that_it_would_have_taken_longer_and_what_comes_after_it_is_believed() -> None:
    time = TokenTime(START)
    time.came(1000, 1e-2, 0.0)

    time.failed(1000, 5.0, 5.0)
    assert time.token_s(5.0) == pytest.approx(5e-3)

    time.came(1000, 2e-2, 6.0)
    assert time.token_s(6.0) == pytest.approx(2e-5)


def test_a_failure_that_took_no_time_says_nothing() -> None:
    time = TokenTime(START)
    time.came(1000, 1e-2, 0.0)

    time.failed(1000, 1e-3, 1.0)

    assert time.token_s(1.0) == pytest.approx(1e-5)


def test_what_is_slow_is_forgotten_down_to_the_beginning_and_what_is_fast_is_not() -> None:
    slow, fast = TokenTime(START), TokenTime(START)
    slow.failed(1000, 5.0, 0.0)
    fast.came(1000, 1e-3, 0.0)

    assert slow.token_s(60.0) == pytest.approx(5e-3 / 4)
    assert slow.token_s(3600.0) == START
    assert fast.token_s(3600.0) == pytest.approx(1e-6)


def test_only_one_tries_what_has_long_been_slow_and_its_outcome_is_believed() -> None:
    time = TokenTime(START)
    for _ in range(50):
        time.came(1000, 5.0, 0.0)

    time.tried(600.0)
    assert time.token_s(600.0) > 4e-3
    assert time.token_s(900.0) < 1e-4  # nobody knows how that ended: another one may try

    time.came(1000, 1e-2, 900.0)
    assert time.token_s(900.0) == pytest.approx(1e-5)


def test_a_worker_to_which_nothing_came_is_taken_to_be_like_the_others_also_by_those_who_try() -> None:
    elders = TokenTime(START)
    one, other = TokenTime(START, elders), TokenTime(START, elders)

    one.failed(1000, 5.0, 0.0)
    assert one.token_s(0.0) == other.token_s(0.0) == pytest.approx(5e-3)

    other.tried(600.0)
    assert other.token_s(600.0) == pytest.approx(5e-3)
    assert one.token_s(600.0) == START

    one.came(1000, 0.2, 600.0)
    assert other.token_s(600.0) == pytest.approx(2e-4)
