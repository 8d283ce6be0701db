"""Pieces of many small runs, as one message: packed at the sender, unpacked at the receiver, hashed on the way.

One message or one part of a system call for each run would cost more than its bytes. What is hashed is the packed copy,
in one call that releases the GIL: run by run, a hashing thread would keep the loop waiting for it.
"""

import xxhash

from kvtransfer.activity import Stop
from kvtransfer.memory import Memory, copy_runs
from kvtransfer.pieces import Runs


def pack(pool: Memory, runs: Runs, message: memoryview, has_checksum: bool, stop: Stop) -> int:
    """Copy runs of the pool into `message`, one after the other. Blocks; releases the GIL.

    Returns:
        xxh3_64 of the bytes, 0 without checksum.

    Raises:
        TransferError: stopped.
    """
    pool.gather(runs, message, stop)
    return xxhash.xxh3_64_intdigest(message) if has_checksum else 0


def unpack(message: memoryview, pool: Memory, runs: Runs, has_checksum: bool, stop: Stop) -> int | None:
    """Undo `pack`. Blocks; releases the GIL.

    Returns:
        xxh3_64 of the bytes, None without checksum.

    Raises:
        TransferError: stopped; some runs may be written.
    """
    copy_runs(Memory(message), pool, runs.with_sources(runs.packed()), stop)
    return xxhash.xxh3_64_intdigest(message) if has_checksum else None
