"""A run file gives back what was written."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from loadtest.records import RatePoint, RequestRecord, RunFile, ServerTiming, Slo

RECORDS = [
    RequestRecord(
        "a", 0, 0, 0.0, 0.1, 0.5, 0.9, 1.0, 10, 3, 5, (0.2, 0.2), "length", server=ServerTiming(1, 2, 3, 4, 5)
    ),
    RequestRecord("b", 1, 2, 0.5, 0.5, end_s=2.0, error="OverloadedError", error_message="full"),
]


def test_a_saved_run_is_loaded_as_it_was(tmp_path: Path) -> None:
    run = RunFile({"target": "x"}, Slo(1, 0.1), RECORDS, (RatePoint(1, 0.9, 0.8),), {"requests": 2})

    run.save(tmp_path / "made" / "run.json")

    assert RunFile.load(tmp_path / "made" / "run.json") == run


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}', '{"format": 1}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"run\.json"):
        RunFile.load(path)
