"""Copying and hashing raw memory outside the GIL, on a transfer endpoint's own threads."""

import ctypes
import os
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from common.errors import TransferError
from kvtransfer import native
from kvtransfer.activity import Stop
from kvtransfer.layout import BlockLayout
from kvtransfer.pieces import IntArray, Runs

STEP_BYTES = 1024 * 1024
"""Copied or hashed between two looks at `Stop`: how long an abort waits for a thread."""


class Memory:
    """The bytes of a pool, ours or a mapped one, by offset. Keeps the buffer alive; threads may share it."""

    def __init__(self, buffer: memoryview) -> None:
        array = np.frombuffer(buffer, dtype=np.uint8)
        self.view = buffer
        self.address = int(array.ctypes.data)
        self.num_bytes = array.nbytes


class OwnPool(NamedTuple):
    """What the halves of an endpoint need of its pool."""

    memory: Memory
    layout: BlockLayout
    num_blocks: int
    threads: Executor
    """Where bytes are copied, checked and coded."""


def copy_threads(worker_id: str) -> ThreadPoolExecutor:
    """Return threads for copies and checksums: half of the cores, at most 4; memory bandwidth is spent by then."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(max(1, min(4, cores // 2)), thread_name_prefix=f"kvcopy-{worker_id}")


def checksum_of(memory: Memory, offsets: IntArray, sizes: IntArray, stop: Stop) -> int:
    """Return xxh3_64 over byte ranges in order. Blocks; releases the GIL.

    Raises:
        TransferError: stopped.
    """
    digest = xxhash.xxh3_64()
    for begin, num_bytes in zip(offsets.tolist(), sizes.tolist(), strict=True):
        for at in range(begin, begin + num_bytes, STEP_BYTES):
            _stop_here(stop)
            digest.update(memory.view[at : min(at + STEP_BYTES, begin + num_bytes)])
    return digest.intdigest()


def copy_runs(source: Memory, target: Memory, runs: Runs, stop: Stop) -> None:
    """Copy `runs`. Blocks; releases the GIL.

    Raises:
        TransferError: stopped; some runs are copied.
    """
    assert not len(runs) or runs.sources.min() >= 0 <= runs.targets.min()
    assert not len(runs) or (runs.sources + runs.sizes).max() <= source.num_bytes
    assert not len(runs) or (runs.targets + runs.sizes).max() <= target.num_bytes
    library = native.library()
    if library is None:
        copy_one_by_one(source, target, runs, stop)
    elif library.baton_copy_runs(source.address, target.address, runs.table.ctypes.data, len(runs), stop.address):
        raise TransferError("stopped")


def copy_one_by_one(source: Memory, target: Memory, runs: Runs, stop: Stop) -> None:
    """Do what `copy_runs` does, where there is no compiler: in Python, run by run."""
    for run in runs:
        for at in range(0, run.num_bytes, STEP_BYTES):
            _stop_here(stop)
            size = min(STEP_BYTES, run.num_bytes - at)
            ctypes.memmove(target.address + run.target + at, source.address + run.source + at, size)


def _stop_here(stop: Stop) -> None:
    if stop.is_set:
        raise TransferError("stopped")
