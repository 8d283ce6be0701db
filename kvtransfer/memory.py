"""Copying and hashing raw memory outside the GIL, on a transfer endpoint's own threads."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from common.control_groups import usable_cores
from common.errors import TransferError
from kvtransfer import native
from kvtransfer.activity import Stop
from kvtransfer.device import DeviceMemory
from kvtransfer.layout import BlockLayout
from kvtransfer.pieces import PIECE_BYTES_MAX, IntArray, Run, Runs
from kvtransfer.store import BlockStore

STEP_BYTES = 1024 * 1024
"""Copied or hashed between two looks at `Stop`: how long an abort waits for a thread."""

SPARE_MAX = 4
"""Buffers of `PIECE_BYTES_MAX` that a pool keeps at rest."""


class PoolMemory(Protocol):
    """The bytes of the own pool, wherever they lie. Calls block; threads may share it."""

    num_bytes: int

    def staging(self, num_bytes: int) -> memoryview:
        """Return host memory for a message to or from the pool; nobody has cleared it: it will be overwritten."""
        ...

    def gather(self, runs: Runs, target: memoryview, stop: Stop) -> None:
        """Copy runs of the pool to host memory, one after the other.

        Raises:
            TransferError: stopped.
        """
        ...

    def scatter(self, source: memoryview, runs: Runs, stop: Stop) -> None:
        """Undo `gather`.

        Raises:
            TransferError: stopped; some runs may be written.
        """
        ...


class Spare:
    """Buffers for packed pieces, kept for the next ones: fresh pages cost more than the copy. Owned by the loop."""

    def __init__(self) -> None:
        self._kept: list[memoryview] = []

    def take(self, num_bytes: int) -> memoryview:
        """Return a buffer of this length; nobody has cleared it."""
        if num_bytes > PIECE_BYTES_MAX:
            return np.empty(num_bytes, dtype=np.uint8).data
        whole = self._kept.pop() if self._kept else np.empty(PIECE_BYTES_MAX, dtype=np.uint8).data
        return whole[:num_bytes]

    def give(self, buffer: memoryview) -> None:
        """Take back what nobody uses any more."""
        whole = memoryview(buffer.obj)
        if whole.nbytes == PIECE_BYTES_MAX and len(self._kept) < SPARE_MAX:
            self._kept.append(whole)


class Memory:
    """The bytes of a pool in host memory, ours or a mapped one, by offset. Implements `PoolMemory`.

    Keeps the buffer alive; threads may share it.
    """

    def __init__(self, buffer: memoryview) -> None:
        array = np.frombuffer(buffer, dtype=np.uint8)
        self.view = buffer
        self.address = int(array.ctypes.data)
        self.num_bytes = array.nbytes
        self.spare = Spare()

    def staging(self, num_bytes: int) -> memoryview:
        """Return ordinary memory."""
        return np.empty(num_bytes, dtype=np.uint8).data

    def gather(self, runs: Runs, target: memoryview, stop: Stop) -> None:
        """See `PoolMemory.gather`."""
        copy_runs(self, Memory(target), runs.with_targets(runs.packed()), stop, is_read_soon=True)

    def scatter(self, source: memoryview, runs: Runs, stop: Stop) -> None:
        """See `PoolMemory.scatter`."""
        copy_runs(Memory(source), self, runs.with_sources(runs.packed()), stop)


class OwnPool(NamedTuple):
    """What the halves of an endpoint need of its pool."""

    memory: PoolMemory
    host: Memory
    """The same bytes for links that read and write them in place; empty where the pool lies in a device."""
    layout: BlockLayout
    num_blocks: int
    threads: Executor
    """Where bytes are copied, checked and coded."""


def own_pool(store: BlockStore, threads: Executor) -> OwnPool:
    """Return what an endpoint needs of `store`."""
    host = Memory(store.buffer)
    memory = host if store.device is None else DeviceMemory(store.device)
    return OwnPool(memory, host, store.layout, store.num_blocks, threads)


@contextmanager
def block_bytes_of(store: BlockStore, block_id: int, is_written: bool = False) -> Iterator[memoryview]:
    """Give the bytes of one block: in place, or a copy of what a device holds. Blocks while that is copied.

    Args:
        store: where the block is.
        block_id: of a block that nobody else touches meanwhile.
        is_written: the block is overwritten as a whole: a copy begins with no meaning, and goes back to the device at
            the end, unless that is an exception.
    """
    size = store.layout.block_bytes
    if store.device is None:
        yield store.buffer[block_id * size : (block_id + 1) * size]
        return
    memory, runs = DeviceMemory(store.device), Runs.of([Run(block_id * size, block_id * size, size)])
    staging = memory.staging(size)
    if not is_written:
        memory.gather(runs, staging, Stop())
    yield staging
    if is_written:
        memory.scatter(staging, runs, Stop())


def copy_threads(worker_id: str) -> ThreadPoolExecutor:
    """Return threads for copies and checksums: half of the usable cores, at most 4: then bandwidth is spent."""
    return ThreadPoolExecutor(max(1, min(4, usable_cores() // 2)), thread_name_prefix=f"kvcopy-{worker_id}")


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


def copy_runs(source: Memory, target: Memory, runs: Runs, stop: Stop, is_read_soon: bool = False) -> None:
    """Copy `runs`. Blocks; releases the GIL.

    Args:
        source: where they are read.
        target: where they are written.
        runs: within both.
        stop: end early.
        is_read_soon: leave the copy in the caches, for whoever hashes or sends it; else it goes around them.

    Raises:
        TransferError: stopped; some runs are copied.
    """
    assert not len(runs) or runs.sources.min() >= 0 <= runs.targets.min()
    assert not len(runs) or (runs.sources + runs.sizes).max() <= source.num_bytes
    assert not len(runs) or (runs.targets + runs.sizes).max() <= target.num_bytes
    library = native.library()
    if library is None:
        copy_one_by_one(source, target, runs, stop)
    elif library.baton_copy_runs(
        source.address, target.address, runs.table.ctypes.data, len(runs), not is_read_soon, stop.address
    ):
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
