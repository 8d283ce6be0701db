"""Copying and hashing raw memory outside the GIL, on a transfer endpoint's own threads."""

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.pieces import Run

STEP_BYTES = 1024 * 1024
"""Copied, then hashed while still in the cache; also how long an abort waits for a copying thread."""


class Memory:
    """The bytes of a pool, ours or a mapped one, by offset. Keeps the buffer alive; threads may share it."""

    def __init__(self, buffer: memoryview) -> None:
        array = np.frombuffer(buffer, dtype=np.uint8)
        self.view = buffer
        self.address = int(array.ctypes.data)
        self.num_bytes = array.nbytes


def copy_threads(worker_id: str) -> ThreadPoolExecutor:
    """Return threads for copies and checksums: half of the cores, at most 4; memory bandwidth is spent by then."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(max(1, min(4, cores // 2)), thread_name_prefix=f"kvcopy-{worker_id}")


def checksum_of(memory: Memory, offsets: Sequence[tuple[int, int]], stop: Stop) -> int:
    """Return xxh3_64 over (offset, bytes) ranges in order. Blocks; releases the GIL.

    Raises:
        TransferError: stopped.
    """
    digest = xxhash.xxh3_64()
    for begin, num_bytes in offsets:
        for at in range(begin, begin + num_bytes, STEP_BYTES):
            _stop_here(stop)
            digest.update(memory.view[at : min(at + STEP_BYTES, begin + num_bytes)])
    return digest.intdigest()


def copy_runs(source: Memory, target: Memory, runs: Sequence[Run], checksum: bool, stop: Stop) -> int | None:
    """Copy `runs` and return xxh3_64 of the bytes as they are in the target. Blocks; releases the GIL.

    Raises:
        TransferError: stopped; some runs are copied.
    """
    digest = xxhash.xxh3_64() if checksum else None
    for run in runs:
        for at in range(0, run.num_bytes, STEP_BYTES):
            _stop_here(stop)
            size = min(STEP_BYTES, run.num_bytes - at)
            begin = run.target + at
            assert begin + size <= target.num_bytes
            assert run.source + at + size <= source.num_bytes
            ctypes.memmove(target.address + begin, source.address + run.source + at, size)
            if digest is not None:
                digest.update(target.view[begin : begin + size])
    return None if digest is None else digest.intdigest()


def _stop_here(stop: Stop) -> None:
    if stop.is_set:
        raise TransferError("stopped")
