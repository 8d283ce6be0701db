"""What kvtransfer needs of a pool: bytes by block and layer range. engine.kv_cache implements it without inheriting."""

from typing import Protocol

from kvtransfer.device import Device
from kvtransfer.layout import BlockLayout


class BlockStore(Protocol):
    """A block-major pool: block b lies at `[b * block_bytes, (b + 1) * block_bytes)` of one contiguous region.

    The store moves no state: which block is free or used is the worker loop's knowledge.
    """

    @property
    def layout(self) -> BlockLayout:
        """Shape and dtype of a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    @property
    def buffer(self) -> memoryview:
        """All `num_blocks * block_bytes` bytes, writable, format "B"; none where the pool lies in a device."""
        ...

    @property
    def memfd(self) -> int | None:
        """Descriptor of the memfd behind `buffer` (offset 0), for peers on this host; None: not shareable."""
        ...

    @property
    def device(self) -> Device | None:
        """The device that the pool lies in, and how its bytes get out of it and into it; None: host memory."""
        ...
