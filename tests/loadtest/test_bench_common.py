"""A benchmark's file has the agreed format, and its ratio and goal always mean that more is better for us."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.bench.common import BenchRow, Repeated, publish


def test_the_file_has_the_agreed_fields(tmp_path: Path) -> None:
    row = BenchRow("speed", 4.0, "1/s", True, 2.0, "other", 3.0, 0.1, "once")

    path = publish("demo", [row, BenchRow("alone", 1.0, "ms", False, note="peer does not build here")], tmp_path)

    tree = json.loads(path.read_text())
    assert path.name == "demo.json"
    assert set(tree) == {"machine", "commit", "rows"}
    assert tree["rows"][0] == {
        "name": "speed",
        "ours": 4.0,
        "peer": 2.0,
        "peer_name": "other",
        "unit": "1/s",
        "ratio": 2.0,
        "goal": 3.0,
        "met": True,
        "spread": 0.1,
        "note": "once",
    }
    assert (tree["rows"][1]["peer"], tree["rows"][1]["ratio"], tree["rows"][1]["met"]) == (None, None, None)


@pytest.mark.parametrize(
    ("is_higher_better", "ratio", "met"), [(True, 2.0, True), (False, 0.5, False)], ids=["higher", "lower"]
)
def test_ratio_and_goal_follow_the_direction(is_higher_better: bool, ratio: float, met: bool) -> None:
    row = BenchRow("x", 4.0, "u", is_higher_better, peer=2.0, goal=3.0)

    assert (row.ratio, row.met) == (ratio, met)


def test_repeated_is_median_and_relative_spread() -> None:
    assert Repeated.of([4.0, 1.0, 2.0]) == Repeated(2.0, 1.5)


def test_all_benchmarks_that_are_commands_are_found_under_one_name() -> None:
    baton = Path(sys.executable).parent / "baton"

    done = subprocess.run([baton, "bench", "--help"], capture_output=True, text=True, check=False)

    assert done.returncode == 0
    assert all(name in done.stdout for name in ("transfer", "codecs", "quality"))
