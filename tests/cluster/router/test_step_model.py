"""Coefficients follow what workers report, whatever the start was, and no single report leads them astray."""

from random import Random

import pytest

from cluster.router.step_model import StepLearner, StepModel, StepTotals

FAST = StepModel(base_s=0.00685, token_s=3.25e-5, pair_s=1.06e-9, sequence_s=3.25e-5, context_s=5.6e-8)
SLOW = StepModel(base_s=0.007, token_s=1.33e-3, pair_s=1.7e-6, sequence_s=2e-3, context_s=2.7e-6)


class Machine:
    """A worker whose steps cost what a model says, times some noise."""

    def __init__(self, truth: StepModel, rng: Random) -> None:
        self.truth = truth
        self.totals = StepTotals()
        self._rng = rng
        self._busy = 1.0

    def prefill(self, noise: float = 1.0) -> None:
        tokens = max(1, int(self._busy * self._rng.randrange(50, 4000)))
        self._step(tokens, self._rng.randrange(4000), 0, 0, noise)

    def decode(self, noise: float = 1.0) -> None:
        sequences = max(1, int(self._busy * 40))
        self._step(0, 0, sequences, sequences * self._rng.randrange(100, 4000), noise)

    def load(self, busy: float) -> None:
        """Have large batches (1) or small ones (0) from now on."""
        self._busy = busy

    def _step(self, tokens: int, before: int, sequences: int, context: int, noise: float) -> None:
        pairs = tokens * (before + tokens / 2)
        truth, now = self.truth, self.totals
        seconds = truth.base_s + tokens * truth.token_s + pairs * truth.pair_s
        seconds += sequences * truth.sequence_s + context * truth.context_s
        self.totals = StepTotals(
            now.steps + 1,
            now.seconds + seconds * noise,
            now.prompt_tokens + tokens,
            now.prompt_pairs + pairs,
            now.sequences + sequences,
            now.context_tokens + context,
        )


def run(machine: Machine, learner: StepLearner, num_steps: int, noise: float = 0.0, seed: int = 0) -> None:
    rng = Random(seed)
    learner.report(machine.totals)
    for number in range(num_steps):
        if number % 100 == 0:
            machine.load(rng.random())
        factor = 1 + noise * (2 * rng.random() - 1)
        (machine.prefill if rng.random() < 0.2 else machine.decode)(factor)
        learner.report(machine.totals)


def error(model: StepModel, truth: StepModel) -> float:
    """Return the largest relative error over usual steps."""
    cases = [(model.prefill_s(n, m), truth.prefill_s(n, m)) for n in (200, 2000) for m in (0, 2000)]
    cases += [(model.decode_s(n, c), truth.decode_s(n, c)) for n, c in ((1, 500), (20, 30_000))]
    return max(abs(ours / true - 1) for ours, true in cases)


@pytest.mark.parametrize("truth", [pytest.param(FAST, id="fast"), pytest.param(SLOW, id="forty times slower")])
def test_any_machine_is_learned_from_the_same_start(truth: StepModel) -> None:
    learner = StepLearner()

    run(Machine(truth, Random(1)), learner, 3000, noise=0.1)

    assert error(learner.model, truth) < 0.15


def test_the_first_reports_already_give_the_scale_of_everything() -> None:
    learner, machine = StepLearner(), Machine(SLOW, Random(1))
    learner.report(machine.totals)

    for _ in range(3):
        machine.prefill()
        learner.report(machine.totals)

    assert 0.5 < learner.model.prefill_s(1000, 1000) / SLOW.prefill_s(1000, 1000) < 2
    assert learner.model.sequence_s > 3 * StepLearner().model.sequence_s


def test_a_machine_that_becomes_slower_is_followed() -> None:
    learner, machine = StepLearner(), Machine(FAST, Random(1))
    run(machine, learner, 3000)
    machine.truth = StepModel(*(2 * coefficient for coefficient in FAST))

    run(machine, learner, 4000)

    assert error(learner.model, machine.truth) < 0.2


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_one_disturbed_observation_changes_little(factor: float) -> None:
    learner, machine = StepLearner(), Machine(FAST, Random(1))
    run(machine, learner, 3000)
    before = learner.model.prefill_s(1000, 1000)

    for _ in range(30):
        machine.prefill(factor)
    learner.report(machine.totals)

    assert abs(learner.model.prefill_s(1000, 1000) / before - 1) < 0.45
    run(machine, learner, 3000)
    assert error(learner.model, FAST) < 0.2


def test_what_a_worker_has_not_shown_is_taken_from_all_workers_together() -> None:
    elders = StepLearner()
    prefiller, decoder = StepLearner(elders=elders), StepLearner(elders=elders)
    machine, other = Machine(SLOW, Random(1)), Machine(SLOW, Random(2))
    prefiller.report(machine.totals)
    decoder.report(other.totals)
    for number in range(300):
        other.load(number % 10 / 10)
        machine.prefill()
        prefiller.report(machine.totals)
        other.decode()
        decoder.report(other.totals)

    assert decoder.model.prefill_s(2000, 500) == pytest.approx(SLOW.prefill_s(2000, 500), rel=0.5)
    assert decoder.model.decode_s(20, 30_000) == pytest.approx(SLOW.decode_s(20, 30_000), rel=0.3)
    assert StepLearner(elders=elders).model == elders.model


def test_a_restarted_worker_begins_to_count_anew() -> None:
    learner, machine = StepLearner(), Machine(FAST, Random(1))
    run(machine, learner, 3000)
    known = learner.model

    machine.totals = StepTotals()
    learner.report(machine.totals)
    assert learner.model == known
    run(machine, learner, 500)

    assert error(learner.model, FAST) < 0.2


def test_a_report_without_further_steps_teaches_nothing() -> None:
    elders = StepLearner()
    learner, machine = StepLearner(elders=elders), Machine(FAST, Random(1))
    run(machine, learner, 3000)
    known, seen, told = learner.model, learner.num_observations, elders.num_observations

    assert not any(learner.report(machine.totals) for _ in range(10))

    assert (learner.model, learner.num_observations, elders.num_observations) == (known, seen, told)


def test_all_workers_together_need_not_hear_everything_of_one_that_has_told_its_own() -> None:
    elders = StepLearner()
    learner, machine = StepLearner(elders=elders), Machine(FAST, Random(1))
    run(machine, learner, 6000, noise=0.1)

    assert elders.num_observations < learner.num_observations / 2
    assert error(elders.model, FAST) < 0.2
