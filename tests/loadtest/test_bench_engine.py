"""The engine benchmark compares within a round, takes the best peer of each, and goes on without those that fail."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadtest.bench.contenders import Contender, ContenderError, RunningEngine
from loadtest.bench.engine import CASES, QUICK_CASES, READ_SHARE_GOAL, Sample, measure, rows_of
from loadtest.bench.quiet import CpuUse
from loadtest.bench.read_rate import read_seconds

DECODE, _, PREFILL = QUICK_CASES
OURS = Contender("ours", None, 4, "baton", ())
FAST, SLOW = (Contender(name, "llama-cpp", 8, "llama", ()) for name in ("fast", "slow"))


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)  # logs go to build/bench
    with ExitStack() as engines:
        yield engines


def driver(stack: ExitStack, *arguments: str) -> RunningEngine:
    command = [sys.executable, "-m", "tests.loadtest.engine_driver", *arguments]
    return stack.enter_context(RunningEngine(command, "driver"))


def test_figures_come_in_turn_and_a_failure_stops_only_its_engine(stack: ExitStack) -> None:
    engines = {"good": driver(stack, "100"), "bad": driver(stack, "50", "prefill")}
    for engine in engines.values():
        assert engine.wait_ready() >= 0
    failures: dict[str, str] = {}

    samples = measure(engines, [DECODE, PREFILL], 3, failures)

    assert [sample.tokens_per_s for sample in samples["good", DECODE.name]] == pytest.approx([100] * 3)
    assert [sample.tokens_per_s for sample in samples["good", PREFILL.name]] == pytest.approx([100] * 3)
    assert len(samples["bad", DECODE.name]) == 1
    assert ("bad", PREFILL.name) not in samples
    assert failures == {"bad": "prefill 512: RuntimeError: no room"}


def test_an_engine_that_cannot_be_loaded_says_why(stack: ExitStack) -> None:
    with pytest.raises(ContenderError, match="no such model"):
        driver(stack, "none").wait_ready()


def test_a_goal_needs_the_worst_of_three_rounds_against_the_best_peer_of_each() -> None:
    figures = {"ours": [200.0, 200.0, 200.0], "fast": [100.0, 110.0, 90.0], "slow": [50.0, 50.0, 125.0]}
    samples = {(name, DECODE.name): [Sample(rate, 0.01) for rate in rates] for name, rates in figures.items()}

    ratio, *rest = rows_of(samples, [OURS, FAST, SLOW], [DECODE], 2)

    assert ratio.ours == pytest.approx(200 / 125)
    assert (ratio.goal, ratio.met) == (1.7, False)
    assert "2.00, 1.82, 1.60 against fast, slow" in ratio.note
    assert [(row.ours, row.peer_name, row.peer) for row in rest] == [(200, "fast", 100), (200, "slow", 50)]


def test_two_rounds_are_no_basis_for_a_goal_and_a_disturbance_is_told() -> None:
    samples = {("ours", DECODE.name): [Sample(2, 0.3)] * 2, ("fast", DECODE.name): [Sample(1, 0.0)] * 2}

    ratio, _ = rows_of(samples, [OURS, FAST], [DECODE], 2)

    assert ratio.goal is None
    assert "2 of 4 figures disturbed" in ratio.note


def test_on_one_thread_the_worst_round_must_come_near_the_time_that_reading_the_weights_takes() -> None:
    samples = {("ours", DECODE.name): [Sample(rate, 0.01, read_s=0.009) for rate in (100.0, 90.0, 95.0)]}

    [share, figure] = rows_of(samples, [OURS], [DECODE], 1)
    [share_on_two, _] = rows_of(samples, [OURS], [DECODE], 2)

    assert share.ours == pytest.approx(0.81)
    assert (share.goal, share.met) == (READ_SHARE_GOAL, False)
    assert share_on_two.goal is None
    assert figure.ours == 95


def test_engines_of_ours_get_the_time_to_read_their_weights(stack: ExitStack) -> None:
    engines = {"ours": driver(stack, "100"), "other": driver(stack, "100")}
    for engine in engines.values():
        engine.wait_ready()

    samples = measure(engines, [DECODE, PREFILL], 2, {}, {"ours": lambda: 0.5})

    assert [sample.read_s for sample in samples["ours", DECODE.name]] == [0.5, 0.5]
    assert samples["ours", PREFILL.name][0].read_s is samples["other", DECODE.name][0].read_s is None


def test_reading_more_takes_longer(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(4096))
    large.write_bytes(bytes(64 << 20))

    assert 0 < read_seconds(small, 1) < read_seconds(large, 2)


def test_every_goal_of_the_full_run_has_a_case() -> None:
    with_goals = {case.name for case in CASES if case.goals}

    assert with_goals == {"decode b1", "decode b8", "decode b16", "prefill 512"}


def test_own_work_is_not_counted_as_others() -> None:
    before = CpuUse.now([])
    sum(range(5_000_000))
    after = CpuUse.now([])

    assert after.own_s > before.own_s
    assert 0 <= before.others_until(after) <= 1
    assert CpuUse.now([os.getpid()]).own_s >= 2 * after.own_s  # counted twice when named twice
