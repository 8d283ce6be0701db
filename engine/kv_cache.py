"""The bytes of the pool: one memfd, block-major, that peers on this host may map and attention sees layer by layer."""

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Protocol

from common.errors import ConfigError
from kvtransfer.device import Device
from kvtransfer.layout import BlockLayout
from kvtransfer.store import BlockStore

if TYPE_CHECKING:
    import torch

MIB = 1024 * 1024
WINDOWS_MAX = 64
"""Most context windows in a pool that nobody gave a size: a tiny model's would have millions of blocks."""


class KVMemory(BlockStore, Protocol):
    """The bytes of a pool as an engine sees them, wherever they lie."""

    def tensor(self) -> "torch.Tensor":
        """Return the pool as `[num_blocks, L, 2, block_tokens, H, D]`, sharing memory; not for scaled types."""
        ...

    def raw(self) -> "torch.Tensor":
        """Return the pool as bytes, `[num_blocks, block_bytes]`, sharing memory."""
        ...

    def close(self) -> None:
        """Give the memory back, or leave it to the last view that is dropped. Idempotent."""
        ...


def elements(raw: "torch.Tensor", layout: BlockLayout) -> "torch.Tensor":
    """Return a pool's bytes, `[num_blocks, block_bytes]`, as `KVMemory.tensor` has them."""
    import torch

    assert layout.scale_bytes == 0, f"a pool of {layout.dtype} is no plain array"
    shape = (layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
    return raw.view(getattr(torch, layout.dtype)).view(raw.shape[0], *shape)


class KVCache:
    """All blocks in host memory: `[block][layer][K,V][token][kv head][head dim]`. Implements `KVMemory`.

    Which block is free or used is the BlockPool's knowledge. The memory is sparse until it is written to. Owned by one
    worker; the compute thread and transfers touch disjoint blocks.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int) -> None:
        """Map the memory.

        Raises:
            ConfigError: the machine does not give that much.
        """
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        num_bytes = num_blocks * layout.block_bytes
        memfd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memfd, num_bytes)
            self._map = mmap.mmap(memfd, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(memfd)
            raise ConfigError(
                f"cannot map a KV pool of {num_blocks} blocks, {num_bytes // MIB} MiB: {error}"
            ) from error
        self._memfd: int | None = memfd
        self.device: Device | None = None
        # Fewer TLB misses where the kernel has shmem_enabled=advise; elsewhere it refuses and nothing is lost.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = memoryview(self._map)

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable, format "B"."""
        return self._buffer

    @property
    def memfd(self) -> int | None:
        """Descriptor of the memory; None after close."""
        return self._memfd

    def tensor(self) -> "torch.Tensor":
        """Return the pool as `[num_blocks, L, 2, block_tokens, H, D]`, sharing memory; not for scaled types.

        The view keeps the mapping alive: drop it before `close`, or the memory stays until it is dropped.
        """
        return elements(self.raw(), self.layout)

    def raw(self) -> "torch.Tensor":
        """Return the pool as bytes, `[num_blocks, block_bytes]`, sharing memory; see `tensor`."""
        import numpy as np
        import torch

        # By way of numpy, which holds on to the mapping: torch.frombuffer would let it be unmapped under a live tensor.
        return torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8)).view(self.num_blocks, self.layout.block_bytes)

    def close(self) -> None:
        """Give the memory back, or leave it to the last view that is dropped. Idempotent."""
        if self._memfd is None:
            return
        os.close(self._memfd)
        self._memfd = None
        # A view that somebody still holds keeps its pages; the mapping then goes with it.
        with contextlib.suppress(BufferError):
            self._buffer.release()
            self._map.close()


def blocks_of_free_memory(layout: BlockLayout, share: float, context_tokens: int, free: int) -> int:
    """Return how many blocks a pool has that nobody gave a size: a share of the `free` bytes, at most 64 windows.

    Raises:
        ConfigError: the share holds no block.
    """
    num_blocks = min(int(free * share) // layout.block_bytes, WINDOWS_MAX * -(-context_tokens // layout.block_tokens))
    if num_blocks == 0:
        raise ConfigError(
            f"engine.pool_share={share} holds no block: one has {layout.block_bytes} bytes, {free // MIB} MiB are free"
        )
    return num_blocks


def blocks_within(layout: BlockLayout, pool_mib: int) -> int:
    """Return how many blocks fit in `pool_mib` MiB.

    Raises:
        ConfigError: not even one.
    """
    num_blocks = pool_mib * MIB // layout.block_bytes
    if num_blocks == 0:
        raise ConfigError(f"engine.pool_mib={pool_mib} holds no block: one has {layout.block_bytes} bytes")
    return num_blocks
