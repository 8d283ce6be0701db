"""Runs are copied byte for byte to where they belong and nowhere else, compiled or not, and a stop ends it."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.memory import STEP_BYTES, Memory, checksum_of, copy_one_by_one, copy_runs
from kvtransfer.pieces import IntArray, Run, Runs

POOL_BYTES = 40_000


def pool(seed: int, num_bytes: int = POOL_BYTES) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


@st.composite
def disjoint_runs(draw: st.DrawFn) -> list[Run]:
    """Runs of odd sizes at odd places, whose targets do not overlap."""
    runs, at = [], 0
    for size in draw(st.lists(st.integers(1, 5000), max_size=8)):
        at += draw(st.integers(0, 70))
        if at + size > POOL_BYTES:
            break
        runs.append(Run(draw(st.integers(0, POOL_BYTES - size)), at, size))
        at += size
    return draw(st.permutations(runs))


@settings(deadline=None)
@given(disjoint_runs())
def test_runs_arrive_where_they_belong_and_nowhere_else(runs: list[Run]) -> None:
    source, target = pool(1), pool(2)
    expected = bytearray(target)
    for run in runs:
        expected[run.target : run.target + run.num_bytes] = source[run.source : run.source + run.num_bytes]

    copy_runs(Memory(memoryview(source)), Memory(memoryview(target)), Runs.of(runs), Stop())

    assert target == expected


@settings(deadline=None)
@given(disjoint_runs())
def test_packing_and_unpacking_gives_the_same_bytes_and_checksum(runs: list[Run]) -> None:
    source, direct, unpacked = pool(1), pool(2), pool(2)
    table = Runs.of(runs)
    staging = Memory(memoryview(bytearray(table.num_bytes or 1)))

    copy_runs(Memory(memoryview(source)), Memory(memoryview(direct)), table, Stop())
    copy_runs(Memory(memoryview(source)), staging, table.with_targets(table.packed()), Stop())
    copy_runs(staging, Memory(memoryview(unpacked)), table.with_sources(table.packed()), Stop())

    assert direct == unpacked
    assert list(table) == runs
    sums = [
        checksum_of(Memory(memoryview(source)), table.sources, table.sizes, Stop()),
        checksum_of(Memory(memoryview(unpacked)), table.targets, table.sizes, Stop()),
        checksum_of(staging, table.packed(), table.sizes, Stop()),
    ]
    assert len(set(sums)) == 1


def test_without_a_compiler_runs_are_copied_all_the_same() -> None:
    source, target = pool(1), pool(2)

    copy_one_by_one(Memory(memoryview(source)), Memory(memoryview(target)), Runs.of([Run(3, 100, 5000)]), Stop())

    assert target[100:5100] == source[3:5003]
    assert target[:100] == pool(2)[:100]


@pytest.mark.parametrize("copy", [copy_runs, copy_one_by_one])
def test_a_copy_that_is_not_wanted_any_more_stops(copy: Callable[[Memory, Memory, Runs, Stop], None]) -> None:
    source, target = Memory(memoryview(pool(1, STEP_BYTES))), Memory(memoryview(pool(2, STEP_BYTES)))
    stop = Stop()
    stop.set()

    with pytest.raises(TransferError):
        copy(source, target, Runs.of([Run(0, 0, STEP_BYTES)]), stop)
    with pytest.raises(TransferError):
        checksum_of(source, *_whole(source), stop)
    assert target.view == pool(2, STEP_BYTES)


def test_copies_stay_inside_both_pools() -> None:
    small = Memory(memoryview(bytearray(100)))

    for run in (Run(50, 0, 51), Run(0, 50, 51), Run(-1, 0, 10), Run(0, -1, 10)):
        with pytest.raises(AssertionError):
            copy_runs(small, small, Runs.of([run]), Stop())


def _whole(of: Memory) -> tuple[IntArray, IntArray]:
    runs = Runs.of([Run(0, 0, of.num_bytes)])
    return runs.sources, runs.sizes
