"""Compute threads run where and as the configuration says, and nothing else in the process is moved."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import ConfigError
from engine.placement import Placement

ROOT = Path(__file__).parents[2]
SCOPE = f"test-{os.getpid()}"
"""So that tests which run at the same time have nothing to do with each other."""
HERE = sorted(os.sched_getaffinity(0))


def state() -> tuple[set[int], int]:
    return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)


@pytest.fixture
def place() -> Iterator[Callable[..., Placement]]:
    """Return `Placement.of`; what it made is released."""
    made: list[Placement] = []

    def make(worker_id: str, cores: list[int], threads: int, nice: int = 0) -> Placement:
        made.append(Placement.of(worker_id, cores, threads, nice, SCOPE))
        return made[-1]

    yield make
    for placement in made:
        placement.release()


def test_only_the_calling_thread_and_those_that_it_starts_are_placed(place: Callable[..., Placement]) -> None:
    before = state()
    inherited: list[tuple[set[int], int]] = []

    with ThreadPoolExecutor(1, initializer=place("p", HERE[:1], 1, 3).take) as pool:
        placed = pool.submit(state).result()
        child = threading.Thread(target=lambda: inherited.append(state()))
        pool.submit(child.start).result()
        child.join()

    assert placed == ({HERE[0]}, min(19, before[1] + 3))
    assert inherited == [placed]
    assert state() == before


def test_nothing_is_asked_for_by_default(place: Callable[..., Placement]) -> None:
    before = state()

    for placement in (Placement(), place("decode-0", [], 2), place("decode-1", [], 2)):
        placement.take()

    assert state() == before


@pytest.mark.skipif(len(HERE) < 2, reason="needs two cores")
def test_workers_of_a_host_get_cores_of_their_own_whatever_their_roles(place: Callable[..., Placement]) -> None:
    cores = [HERE[-1], HERE[0]]

    first, second = place("decode-0", cores, 1), place("both-0", cores, 1)

    assert [*first.cores, *second.cores] == cores
    with pytest.raises(
        ConfigError, match=rf"decode-1 needs 1 of the cores .* are pinned to \[{cores[0]}, {cores[1]}\]"
    ):
        place("decode-1", cores, 1)
    first.release()
    with pytest.raises(ConfigError, match="decode-2 needs 2 of the cores"):
        place("decode-2", cores, 2)
    assert place("decode-1", cores, 1).cores == {HERE[-1]}  # whoever is refused has taken nothing


@pytest.mark.parametrize("threads", [0, 64])
def test_a_worker_with_more_threads_than_cores_gets_all_of_them(place: Callable[..., Placement], threads: int) -> None:
    assert place("d", HERE[:2], threads).cores == set(HERE[:2])


def test_the_cores_of_a_process_that_was_killed_are_free(place: Callable[..., Placement]) -> None:
    code = """
import sys
from engine.placement import Placement
held = Placement.of("d", [int(sys.argv[1])], 1, 0, sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(HERE[0]), SCOPE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="other workers of this host"):
            place("d", HERE[:1], 1)
        worker.kill()

    assert place("d", HERE[:1], 1).cores == {HERE[0]}


def test_a_core_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cores \[4095\] of prefill-0"):
        Placement.of("prefill-0", [4095], 1, 0)
