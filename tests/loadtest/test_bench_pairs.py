"""Pairs of processes really move the work, by each means alike, and one that cannot be measured says why."""

import asyncio
from pathlib import Path

import pytest

from loadtest.bench.pairs import MEMCPY, OURS_SHM, OURS_UCX, RAW_TCP, Means, measure

pytestmark = pytest.mark.slow


def test_all_means_are_measured_in_turn_and_deliver_every_byte(tmp_path: Path) -> None:
    means = [MEMCPY, OURS_SHM, OURS_UCX, RAW_TCP]

    results = asyncio.run(measure(means, "tiny", ["whole", "layers"], 2, tmp_path))

    assert {key: samples.absent for key, samples in results.items() if samples.absent} == {}
    assert all(len(samples.seconds) == 2 for samples in results.values())
    assert all("CPU" in samples.cpu for samples in results.values())


def test_means_that_are_not_there_say_so_and_hold_nobody_up(tmp_path: Path) -> None:
    unknown = Means("unknown", "ours", "carrier-pigeon")

    results = asyncio.run(measure([unknown, MEMCPY], "tiny", ["whole"], 1, tmp_path))

    assert not results["unknown", "whole"].is_measured
    assert "ended" in results["unknown", "whole"].absent
    assert results[MEMCPY.name, "whole"].is_measured
