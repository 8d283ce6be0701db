"""The search ends, near the true limit, whatever that limit is."""

from hypothesis import given
from hypothesis import strategies as st

from loadtest.goodput import GoodputSearch
from loadtest.records import RatePoint

RATES = st.floats(0.1, 1000)


def searched(search: GoodputSearch, limit: float) -> float:
    """Search a cluster that meets the SLO up to `limit` and no further."""
    while (rate := search.next_rate) is not None:
        search.observe(RatePoint(rate, 1.0 if rate <= limit else 0.5, min(rate, limit)))
    return search.best_rate


@given(limit=RATES, share=st.floats(0.001, 60))
def test_the_search_ends_just_below_the_limit(limit: float, share: float) -> None:
    first = limit * share
    best = searched(GoodputSearch(first, precision=0.05, measurements_max=60), limit)

    assert limit / 1.06 <= best <= limit


def test_a_cluster_that_never_meets_the_slo_has_no_rate() -> None:
    search = GoodputSearch(1.0)

    assert searched(search, 0.0) == 0.0
    assert len(search.points) == 7


@given(st.lists(st.booleans(), min_size=40, max_size=40))
def test_noise_cannot_make_it_run_forever_or_report_a_rate_never_measured_good(outcomes: list[bool]) -> None:
    search = GoodputSearch(1.0, measurements_max=12)
    results = iter(outcomes)

    while (rate := search.next_rate) is not None:
        search.observe(RatePoint(rate, 1.0 if next(results) else 0.0, rate))

    assert len(search.points) <= 12
    good = [point.rate for point in search.points if point.attainment == 1.0]
    assert search.best_rate == max(good, default=0.0)
