"""What a fetch is expected to cost follows what fetches have taken."""

import pytest

from cluster.router.fetch_model import ASK_S, STARTING_TOKEN_S, FetchLearner, FetchTotals


class _Fetches:
    """A worker's totals, as they grow."""

    def __init__(self, *learners: FetchLearner) -> None:
        self.totals = FetchTotals()
        self._learners = learners
        self.report()

    def report(self) -> None:
        for learner in self._learners:
            learner.report(self.totals)

    def fetch(self, num_tokens: int, token_s: float, count: int = 1) -> None:
        fetches, tokens, seconds = self.totals
        self.totals = FetchTotals(fetches + count, tokens + num_tokens, seconds + count * ASK_S + num_tokens * token_s)
        self.report()


def test_the_first_fetch_is_believed() -> None:
    learner = FetchLearner()
    assert learner.token_s == STARTING_TOKEN_S

    _Fetches(learner).fetch(10_000, 1e-3)

    assert learner.token_s == pytest.approx(1e-3)


def test_one_disturbed_fetch_changes_little_and_a_slower_link_is_followed() -> None:
    learner = FetchLearner()
    fetches = _Fetches(learner)
    fetches.fetch(1000, 1e-5)

    fetches.fetch(1000, 1e-2)
    assert learner.token_s < 1.5e-5

    for _ in range(40):
        fetches.fetch(1000, 1e-3, count=2)
    assert learner.token_s == pytest.approx(1e-3, rel=0.05)


def test_a_worker_that_has_fetched_nothing_is_taken_to_be_like_the_others() -> None:
    elders = FetchLearner()
    one, other = FetchLearner(elders), FetchLearner(elders)

    _Fetches(one).fetch(1000, 2e-4)

    assert one.token_s == other.token_s == pytest.approx(2e-4)


def test_nothing_is_learned_from_another_life_or_from_no_tokens() -> None:
    learner = FetchLearner()
    fetches = _Fetches(learner)
    fetches.fetch(1000, 1e-4)

    fetches.fetch(0, 0.0)
    fetches.totals = FetchTotals(0, 0, 0.0)
    fetches.report()
    assert learner.token_s == pytest.approx(1e-4)

    fetches.fetch(500, 1e-4)
    assert learner.token_s == pytest.approx(1e-4)


def test_a_fetch_that_took_no_longer_than_asking_costs_next_to_nothing() -> None:
    learner = FetchLearner()
    learner.report(FetchTotals())

    learner.report(FetchTotals(1, 1000, 1e-3))

    assert 0 < learner.token_s < 1e-7
