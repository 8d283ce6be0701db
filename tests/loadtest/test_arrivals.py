"""Arrival times never go back, follow their rate, and are the same for the same seed."""

from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from loadtest.arrivals import (
    ClosedArrival,
    ConstantArrival,
    GammaArrival,
    PacedArrival,
    PoissonArrival,
    TraceArrival,
    at_rate,
)
from loadtest.workload import parse_arrival

RATES = st.floats(0.01, 1000)
PACED = st.one_of(
    st.builds(PoissonArrival, rate=RATES),
    st.builds(ConstantArrival, rate=RATES),
    st.builds(GammaArrival, rate=RATES, burstiness=st.floats(0.05, 5)),
)


@given(PACED, st.integers())
def test_times_are_reproducible_by_seed_and_never_go_back(arrival: PacedArrival, seed: int) -> None:
    times = list(islice(arrival.times(Random(seed)), 50))

    assert times == list(islice(arrival.times(Random(seed)), 50))
    assert times == sorted(times)
    assert times[0] >= 0


@pytest.mark.parametrize("kind", ["poisson:rate=4", "constant:rate=4", "gamma:rate=4,burstiness=0.5"])
def test_the_long_run_rate_is_the_one_asked_for(kind: str) -> None:
    arrival = parse_arrival(kind)
    assert isinstance(arrival, PoissonArrival | ConstantArrival | GammaArrival)

    last = list(islice(arrival.times(Random(1)), 20_000))[-1]

    assert 20_000 / last == pytest.approx(4, rel=0.05)


def test_gamma_gaps_vary_as_their_burstiness_says() -> None:
    times = list(islice(GammaArrival(rate=1, burstiness=0.25).times(Random(2)), 50_000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)

    squared_cv = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    assert squared_cv == pytest.approx(4, rel=0.1)


@given(PACED, RATES)
@settings(max_examples=20)
def test_at_rate_changes_the_rate_alone(arrival: PacedArrival, rate: float) -> None:
    changed = at_rate(arrival, rate)

    assert changed.rate == rate
    assert changed.model_copy(update={"rate": arrival.rate}) == arrival


@pytest.mark.parametrize("arrival", [ClosedArrival(users=3), TraceArrival()], ids=["closed", "trace"])
def test_what_has_no_rate_becomes_poisson(arrival: ClosedArrival | TraceArrival) -> None:
    assert at_rate(arrival, 2) == PoissonArrival(rate=2)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("poisson", "rate"),
        ("poisson:rate=0", "above 0"),
        ("poisson:rate", "key=value"),
        ("poisson:rate=1,colour=red", "colour"),
        ("sometimes:rate=1", "sometimes"),
    ],
)
def test_a_bad_spec_is_a_config_error_that_names_the_cause(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_arrival(spec)
