"""Pairs of processes really move the work, by each means alike, and one that cannot be measured says why."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.bench.pair_process import Means, Pair
from loadtest.bench.pairs import MEMCPY, OURS_SHM, OURS_UCX, RAW_TCP, Limits, measure

PATIENT = Limits(rounds=2, row_s=100.0, round_s=100.0, start_s=100.0, total_s=500.0)

pytestmark = pytest.mark.slow


def test_all_means_are_measured_in_turn_and_deliver_every_byte(tmp_path: Path) -> None:
    means = [MEMCPY, OURS_SHM, OURS_UCX, RAW_TCP]

    results = asyncio.run(measure(means, "tiny", ["whole", "layers"], PATIENT.deadline(), tmp_path))

    assert {key: samples.absent for key, samples in results.items() if samples.absent} == {}
    assert all(len(samples.seconds) == 2 for samples in results.values())
    assert all("CPU" in samples.cpu for samples in results.values())


def test_means_that_are_not_there_say_so_and_hold_nobody_up(tmp_path: Path) -> None:
    unknown = Means("unknown", "ours", "carrier-pigeon")

    results = asyncio.run(measure([unknown, MEMCPY], "tiny", ["whole"], PATIENT.deadline(), tmp_path))

    assert not results["unknown", "whole"].is_measured
    reason = results["unknown", "whole"].absent
    assert "ended" in reason
    assert "ValidationError" in reason
    assert results[MEMCPY.name, "whole"].is_measured


def test_slow_means_get_fewer_rounds_and_say_how_many(tmp_path: Path) -> None:
    slow = replace(PATIENT, row_s=0.0)

    results = asyncio.run(measure([MEMCPY], "tiny", ["whole"], slow.deadline(), tmp_path))

    assert len(results[MEMCPY.name, "whole"].seconds) == 1
    assert results[MEMCPY.name, "whole"].rounds == "the first round only"


def test_means_that_hang_are_ended_and_never_asked_again(tmp_path: Path) -> None:
    hasty = replace(PATIENT, round_s=0.001)

    results = asyncio.run(measure([RAW_TCP], "tiny", ["whole", "layers"], hasty.deadline(), tmp_path))

    assert ["no answer within 0 s" in results[RAW_TCP.name, order].absent for order in ("whole", "layers")] == [
        True
    ] * 2


def test_when_the_time_is_up_the_rows_say_so(tmp_path: Path) -> None:
    nothing = replace(PATIENT, total_s=0.0)

    results = asyncio.run(measure([MEMCPY], "tiny", ["whole"], nothing.deadline(), tmp_path))

    assert results[MEMCPY.name, "whole"].absent.startswith("left out")


def test_pairs_stand_still_between_their_turns_and_still_end_when_asked(tmp_path: Path) -> None:
    async def one_turn() -> tuple[bool, list[str]]:
        pair = Pair(RAW_TCP, "tiny", tmp_path)
        before = _children()
        try:
            await pair.start(100.0)
            processes = _children() - before
            assert len(processes) == 2
            await asyncio.to_thread(_wait_until_stopped, processes)
            result = await pair.round("whole", 100.0)
            await asyncio.to_thread(_wait_until_stopped, processes)
        finally:
            await pair.close()
        return bool(result["ok"]), sorted(processes & _children())

    is_right, left = asyncio.run(one_turn())

    assert is_right
    assert left == []


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _wait_until_stopped(processes: set[str]) -> None:
    """The signal is on its way when `stop` returns."""
    until = time.monotonic() + 60.0
    while {Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0] for one in processes} != {"T"}:
        assert time.monotonic() < until
        time.sleep(0.01)
