"""A pool in the memory of a real GPU, as tests of transfers use it."""

from typing import Any

import numpy as np

from kvtransfer.device import Device
from kvtransfer.fake import SMALL_LAYOUT
from kvtransfer.fake_device import FakeDeviceStore
from kvtransfer.layout import BlockLayout


class CudaStore:
    """Implements `BlockStore` on a GPU."""

    def __init__(self, num_blocks: int = 16, layout: BlockLayout = SMALL_LAYOUT, index: int = 0) -> None:
        import cupy

        from kvtransfer.cuda.device import CudaDevice

        self.layout = layout
        self.num_blocks = num_blocks
        self.buffer = memoryview(b"")
        self.memfd: int | None = None
        with cupy.cuda.Device(index):
            self._pool: Any = cupy.zeros((num_blocks, layout.block_bytes), cupy.uint8)
            cupy.cuda.runtime.deviceSynchronize()  # the device's own streams do not wait for this one
        self.device: Device | None = CudaDevice(int(self._pool.data.ptr), self._pool.nbytes, index)

    def block(self, block_id: int) -> bytes:
        """Return the bytes of one block."""
        return bytes(self._pool[block_id].get())

    def write(self, block_id: int, data: bytes) -> None:
        """Overwrite one block."""
        self._pool[block_id].set(np.frombuffer(data, np.uint8))

    def fill(self, block_id: int, seed: int) -> None:
        """Overwrite one block; see `FakeBlockStore.fill`."""
        pattern = FakeDeviceStore(1, self.layout)
        pattern.fill(0, seed)
        self.write(block_id, pattern.block(0))
