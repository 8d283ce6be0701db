"""The decode load at the end of a prefill: who will have left by then, and who will have come."""

import pytest

from cluster.router.estimate import DecodeEstimate, PairEstimate, PrefillEstimate
from cluster.router.forecast import forecast
from cluster.router.question import Candidate
from cluster.router.step_model import StepModel

MODEL = StepModel(base_s=0.01, token_s=0.001, pair_s=0.0, sequence_s=0.01, context_s=0.0)
OUTPUT = 100.0


def estimate(num_sequences: int, ttft_s: float) -> PairEstimate:
    decode = Candidate("d0", num_sequences=num_sequences, used_tokens=100 * num_sequences, model=MODEL)
    tpot_s = MODEL.decode_s(num_sequences + 1, 0)
    first = PrefillEstimate(ttft_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    return PairEstimate(decode, None, first, DecodeEstimate(0.0, tpot_s, OUTPUT * tpot_s, 0.0), 0.0, 1.0, True)


def test_a_prefill_that_takes_no_time_meets_the_present_load() -> None:
    assert forecast(estimate(9, 0.0), OUTPUT, 0.0, 0, None, 1.0).tpot_s == MODEL.decode_s(10, 0)


def test_whoever_will_have_ended_by_then_does_not_count() -> None:
    soon, late = (forecast(estimate(9, ttft_s), OUTPUT, 0.0, 0, None, 1.0) for ttft_s in (0.0, 1000.0))

    assert late.tpot_s == MODEL.decode_s(1, 0)
    assert soon.ttft_s == 0.0


def test_those_that_are_placed_meanwhile_count() -> None:
    idle = forecast(estimate(0, 1.0), OUTPUT, 0.0, 0, None, 1.0)
    crowded = forecast(estimate(0, 1.0), OUTPUT, 0.0, 8, None, 1.0)

    assert crowded.tpot_s > 4 * idle.tpot_s


def test_relief_is_the_time_until_the_batch_is_small_enough() -> None:
    met = forecast(estimate(9, 0.0), OUTPUT, 0.0, 0, 0.2, 1.0)
    half = forecast(estimate(9, 0.0), OUTPUT, 0.0, 0, 0.06, 1.0)
    never = forecast(estimate(9, 0.0), OUTPUT, 0.0, 0, 0.005, 1.0)

    assert met.relief_s == 0.0
    assert half.relief_s == pytest.approx(0.5 * OUTPUT * MODEL.decode_s(10, 0))
    assert never.relief_s > 1000
