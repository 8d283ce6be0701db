"""Numbers follow from the records alone: percentiles, goodput from the intended time, errors, cache hits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.metrics import breakdown, distribution, summarize
from loadtest.records import RequestRecord, ServerTiming, Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


def answered(intended: float = 0.0, lag: float = 0.0, ttft: float = 0.5, tpot: float = 0.05) -> RequestRecord:
    """An answer of 11 tokens to a prompt of 100, 25 of which were cached."""
    sent = intended + lag
    first = sent + ttft
    last = first + 10 * tpot
    return RequestRecord(
        "r", 0, 0, intended, sent, first, last, last, 100, 11, 25, (tpot,) * 10, "length", decode_worker="d0"
    )


def failed(error: str) -> RequestRecord:
    return RequestRecord("r", 0, 0, 0.0, 0.0, end_s=1.0, error=error)


@given(VALUES)
def test_percentiles_are_ordered_and_within_the_values(values: list[float]) -> None:
    d = distribution(values)

    assert d.count == len(values)
    assert min(values) <= d.p50 <= d.p90 <= d.p99 <= d.max == max(values)
    assert math.isclose(d.mean, sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-9)


@given(VALUES)
def test_at_least_the_named_share_of_values_lies_at_or_below_the_next_value(values: list[float]) -> None:
    p90 = distribution(values).p90

    above = sorted(value for value in values if value > p90)

    assert len(above) <= math.ceil(0.1 * len(values))


def test_a_distribution_of_known_values() -> None:
    d = distribution([*range(1, 102), None])

    assert (d.count, d.mean, d.p50, d.p90, d.p99, d.max) == (101, 51, 51, 91, 100, 101)


def test_no_values_are_all_zero() -> None:
    assert distribution([]).count == distribution([]).p99 == 0


def test_a_summary_counts_throughput_over_the_whole_run() -> None:
    summary = summarize([answered(0.0), answered(9.0)], SLO)

    assert summary.duration_s == pytest.approx(10.0)
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.output_tokens_per_s == pytest.approx(2.2)
    assert summary.prompt_tokens_per_s == pytest.approx(20)
    assert summary.cache_hit == pytest.approx(0.25)


def test_errors_are_counted_by_type_and_miss_the_slo() -> None:
    summary = summarize(
        [answered(), failed("OverloadedError"), failed("OverloadedError"), failed("DeadlineError")], SLO
    )

    assert summary.errors == {"OverloadedError": 2, "DeadlineError": 1}
    assert summary.completed == 1
    assert summary.slo_attainment == 0.25


@pytest.mark.parametrize(
    ("record", "is_met"),
    [
        (answered(), True),
        (answered(ttft=1.2), False),
        (answered(tpot=0.2), False),
        (answered(lag=0.7), False),  # sent late by the client: still late for the user
        (failed("WorkerLostError"), False),
        (RequestRecord("r", 0, 0, 0.0, 0.0, 0.5, 0.5, 0.5, output_tokens=1), True),  # one token has no TPOT
    ],
    ids=["in time", "slow first token", "slow tokens", "late client", "error", "one token"],
)
def test_the_slo_wants_both_targets_from_the_intended_time(record: RequestRecord, is_met: bool) -> None:
    assert SLO.is_met(record) is is_met


def test_client_lag_is_in_the_intended_ttft_only() -> None:
    summary = summarize([answered(lag=0.3, ttft=0.5)], SLO)

    assert summary.ttft.mean == pytest.approx(0.5)
    assert summary.ttft_intended.mean == pytest.approx(0.8)
    assert summary.send_lag.mean == pytest.approx(0.3)


def test_the_breakdown_sums_to_the_clients_ttft() -> None:
    record = RequestRecord("r", 0, 0, 0, 0, 1.0, 1.5, 1.5, server=ServerTiming(0.9, 0.3, 0.6, 0.1, 0.2))

    parts = breakdown([record, failed("BatonError")])

    assert parts.count == 1
    assert parts.queue_s + parts.prefill_s + parts.network_s == pytest.approx(1.0)
    assert (parts.transfer_exposed_s, parts.first_decode_s) == (0.1, 0.2)


def test_an_empty_run_has_a_summary() -> None:
    assert summarize([], SLO).requests == 0
