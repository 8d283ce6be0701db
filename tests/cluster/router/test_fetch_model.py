"""What a worker's totals of fetches say: differences of two of them, less the asking."""

import pytest

from cluster.router.fetch_model import ASK_S, STARTING_TOKEN_S, FetchLearner, FetchTotals


def learned(*totals: FetchTotals) -> float:
    """Return what a token is expected to take after these reports."""
    learner = FetchLearner()
    for each in totals:
        learner.report(each, 0.0)
    return learner.time.token_s(0.0)


ONE = FetchTotals(1, 1000, ASK_S + 0.1)


def test_a_difference_of_totals_is_an_observation_without_the_asking() -> None:
    two_more = FetchTotals(3, 3000, ONE.seconds + 2 * ASK_S + 2000 * 1e-4)

    assert learned(FetchTotals(), ONE) == pytest.approx(1e-4)
    assert learned(FetchTotals(), ONE, two_more) == pytest.approx(1e-4)


def test_nothing_is_learned_from_a_first_report_no_change_or_another_life() -> None:
    assert learned(ONE) == STARTING_TOKEN_S
    assert learned(ONE, ONE) == STARTING_TOKEN_S
    assert learned(ONE, FetchTotals()) == STARTING_TOKEN_S
    assert learned(FetchTotals(failed_tokens=9, failed_seconds=9.0), FetchTotals()) == STARTING_TOKEN_S


def test_a_fetch_that_took_no_longer_than_asking_costs_next_to_nothing() -> None:
    assert 0 <= learned(FetchTotals(), FetchTotals(1, 1000, 1e-3)) < 1e-7


def test_fetches_that_failed_count_by_what_they_wanted_and_lost() -> None:
    assert learned(FetchTotals(), FetchTotals(failed_tokens=1000, failed_seconds=5.0)) == pytest.approx(5e-3)
    assert learned(FetchTotals(), ONE, ONE._replace(failed_tokens=500, failed_seconds=5.0)) == pytest.approx(1e-2)


def test_fetches_that_failed_at_once_say_nothing_of_the_link() -> None:
    assert learned(FetchTotals(), FetchTotals(failed_tokens=1000, failed_seconds=1e-3)) == STARTING_TOKEN_S
