"""Compute threads run where and as the configuration says, and nothing else in the process is moved."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import ConfigError
from engine.placement import Placement

HERE = sorted(os.sched_getaffinity(0))


def state() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)


def test_only_the_calling_thread_and_those_that_it_starts_are_placed() -> None:
    before = state()
    inherited: list[tuple[set[int], int]] = []

    with ThreadPoolExecutor(1, initializer=Placement(frozenset(HERE[:1]), 3).take) as pool:
        placed = pool.submit(state).result()
        child = threading.Thread(target=lambda: inherited.append(state()))
        pool.submit(child.start).result()
        child.join()

    assert placed == ({HERE[0]}, min(19, before[1] + 3))
    assert inherited == [placed]
    assert state() == before


def test_nothing_is_asked_for_by_default() -> None:
    before = state()

    Placement().take()

    assert state() == before


@pytest.mark.parametrize(
    ("worker_id", "threads", "indices"),
    [("decode-0", 1, [0]), ("decode-1", 1, [1]), ("decode-2", 1, [0]), ("decode-0", 2, [0, 1]), ("d", 0, [0, 1])],
)
def test_workers_of_a_role_take_turns(worker_id: str, threads: int, indices: list[int]) -> None:
    cores = [HERE[0], HERE[-1]]

    placement = Placement.of(worker_id, cores, threads, 0)

    assert placement.cores == {cores[i] for i in indices}


def test_a_core_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cores \[4095\] of prefill-0"):
        Placement.of("prefill-0", [4095], 1, 0)
