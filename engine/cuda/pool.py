"""The bytes of a pool in the memory of a GPU."""

import importlib
from collections.abc import Callable

import torch

from common.errors import ConfigError
from engine.kv_cache import MIB, elements
from kvtransfer.device import Device
from kvtransfer.layout import BlockLayout


def cuda_device(pool: torch.Tensor) -> Device:
    """Return the way that transfers get at a pool.

    Raises:
        ConfigError: CuPy is not installed.
    """
    try:
        module = importlib.import_module("kvtransfer.cuda.device")
    except ImportError as error:
        raise ConfigError(f"KV in a GPU's memory is moved by CuPy, which cannot be used here: {error}") from error
    device: Device = module.CudaDevice(pool.data_ptr(), pool.nbytes, pool.device.index or 0)
    return device


class DevicePool:
    """All blocks, as `engine.kv_cache.KVCache` lays them out. Implements `KVMemory`.

    Args:
        layout: of a block.
        num_blocks: how many.
        where: torch's name of the GPU.
        device_of: makes what transfers use, of the pool's bytes.

    Raises:
        ConfigError: the GPU does not give that much, or its memory cannot be transferred.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        where: str,
        device_of: Callable[[torch.Tensor], Device] = cuda_device,
    ) -> None:
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.buffer = memoryview(b"")
        self.memfd: int | None = None
        try:
            raw = torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8, device=where)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is a size beyond all bounds
            size = num_blocks * layout.block_bytes // MIB
            raise ConfigError(
                f"no room on {where} for a KV pool of {num_blocks} blocks, {size} MiB: {error}"
            ) from error
        self._raw: torch.Tensor | None = raw
        self.device: Device | None = device_of(raw)

    def tensor(self) -> torch.Tensor:
        """See `KVMemory.tensor`."""
        return elements(self.raw(), self.layout)

    def raw(self) -> torch.Tensor:
        """See `KVMemory.raw`."""
        assert self._raw is not None
        return self._raw

    def close(self) -> None:
        """Leave the memory to the last view that is dropped."""
        self._raw = None
        self.device = None


def free_device_bytes(where: str) -> int:
    """Return the bytes of a GPU that nobody has taken."""
    free, _ = torch.cuda.mem_get_info(where)
    return free
