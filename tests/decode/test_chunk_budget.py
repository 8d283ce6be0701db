"""The chunk budget finds the size at which a mixed step takes the time that it may, whatever a token costs."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from decode.chunk_budget import LEAST_TOKENS, TRIAL_TOKENS, ChunkBudget


def steps(budget: ChunkBudget, decode_s: float, token_s: float, count: int, noise: float, seed: int) -> list[float]:
    """Run mixed steps on a machine with these costs; return their times."""
    rng, times = Random(seed), []
    for _ in range(count):
        num_tokens = budget.tokens()
        seconds = (decode_s + token_s * num_tokens) * rng.uniform(1 - noise, 1 + noise)
        budget.observe(8, num_tokens, seconds)
        times.append(seconds)
    return times


@given(decode_s=st.floats(0.002, 0.06), token_s=st.floats(1e-5, 5e-3), noise=st.floats(0, 0.1), seed=st.integers(0, 9))
def test_steps_come_close_to_the_target_and_seldom_beyond(
    decode_s: float, token_s: float, noise: float, seed: int
) -> None:
    budget = ChunkBudget(0.1)
    for _ in range(5):
        budget.observe(8, 0, decode_s)

    times = steps(budget, decode_s, token_s, 60, noise, seed)[20:]

    least = decode_s + LEAST_TOKENS * token_s
    assert sum(seconds > max(0.1, least) * (1 + noise) + token_s for seconds in times) <= 4
    assert max(times) > 0.6 * min(0.1 - 2 * token_s, 0.1)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    budget = ChunkBudget(0.1)
    budget.observe(8, 0, 0.02)
    steps(budget, 0.02, 1e-3, 30, 0.0, 0)
    before = budget.tokens()

    times = steps(budget, 0.02, 4e-3, 40, 0.0, 0)

    assert before > 3 * budget.tokens()
    assert max(times[25:]) <= 0.1 + 4e-3


def test_a_prompt_goes_on_even_where_decoding_alone_is_too_slow() -> None:
    budget = ChunkBudget(0.01)
    assert budget.tokens() == TRIAL_TOKENS

    budget.observe(8, 0, 0.5)
    budget.observe(8, 32, 0.6)

    assert budget.tokens() == LEAST_TOKENS


def test_prompts_alone_teach_what_a_token_costs() -> None:
    budget = ChunkBudget(0.1)

    budget.observe(0, 100, 0.1)

    assert budget.tokens() == 100
