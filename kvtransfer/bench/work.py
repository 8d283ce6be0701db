"""What every contender moves: blocks of one pool into other blocks of another, verified byte for byte."""

import mmap
import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.device import Device
from kvtransfer.fake import FakeBlockStore
from kvtransfer.layout import BlockLayout

_DEMO = BlockLayout("bench", "bfloat16", block_tokens=16, num_layers=30, num_kv_heads=3, head_dim=64)
_LLAMA = BlockLayout("bench", "bfloat16", block_tokens=16, num_layers=32, num_kv_heads=8, head_dim=128)


class Work(NamedTuple):
    """A layout, and how many blocks of it move."""

    layout: BlockLayout
    num_blocks: int

    @property
    def pool_blocks(self) -> int:
        """Blocks in each pool: half as many again, so that no two neighbours need to stay neighbours."""
        return self.num_blocks + self.num_blocks // 2

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.num_blocks * self.layout.block_bytes

    def sources(self) -> list[int]:
        """Return the blocks of the sender's pool."""
        return random.Random(5).sample(range(self.pool_blocks), self.num_blocks)

    def targets(self) -> list[int]:
        """Return the blocks of the receiver's pool."""
        return random.Random(6).sample(range(self.pool_blocks), self.num_blocks)

    def offsets(self, blocks: list[int]) -> list[int]:
        """Return where blocks begin in their pool, in bytes."""
        return [block * self.layout.block_bytes for block in blocks]


WORKS = {
    # 1,024 tokens of the demo model and of Llama 3 8B.
    "demo": Work(_DEMO, 64),
    "8b": Work(_LLAMA, 64),
    # The same bytes in blocks of 6 KiB and of 360 KiB.
    "6KiB": Work(_DEMO._replace(num_layers=1, block_tokens=8), 100_000),
    "360KiB": Work(_DEMO, 100_000 // 60),
    # For tests of the benchmark itself.
    "tiny": Work(_DEMO._replace(num_layers=2), 8),
    # For many small transfers at once.
    "storm": Work(_DEMO._replace(num_layers=8), 2_000),
}


class AnonymousStore:
    """A pool in private memory with huge pages, the best there is for means that need no shared pool."""

    def __init__(self, num_blocks: int, layout: BlockLayout) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        memory = mmap.mmap(-1, num_blocks * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(memory)
        self.memfd: int | None = None
        self.device: Device | None = None


class Pool:
    """One side's pool in this work: filled at the sender, cleared and verified at the receiver."""

    def __init__(self, work: Work, is_shared: bool) -> None:
        kind = FakeBlockStore if is_shared else AnonymousStore
        self.work = work
        self.store = kind(work.pool_blocks, work.layout)
        self.bytes = np.frombuffer(self.store.buffer, dtype=np.uint8)
        self.blocks = self.bytes.reshape(work.pool_blocks, work.layout.block_bytes)
        self.address = int(self.bytes.ctypes.data)

    def fill(self) -> None:
        """Write the content of the source blocks."""
        for place, block in enumerate(self.work.sources()):
            self.blocks[block] = _content(self.work, place)

    def clear(self) -> None:
        """Forget what landed; touches every page, as a running pool's are."""
        self.bytes[:] = 0

    def is_right(self) -> bool:
        """Whether the content is in the target blocks, and nothing is anywhere else."""
        targets = self.work.targets()
        others = np.ones(self.work.pool_blocks, dtype=np.bool_)
        others[targets] = False
        return not self.blocks[others].any() and all(
            np.array_equal(self.blocks[block], _content(self.work, place)) for place, block in enumerate(targets)
        )


def _content(work: Work, place: int) -> NDArray[np.uint8]:
    """Return what the block at `place` holds: a pattern that no other block and no shifted block has."""
    words = np.arange(work.layout.block_bytes // 8, dtype=np.uint64) * 2654435761 + place * 1_000_003 + 1
    return words.view(np.uint8)
