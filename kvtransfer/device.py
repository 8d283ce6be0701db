"""A pool in the memory of a device: what transfers need of the device, and the pool seen from the host through it.

`kvtransfer.cuda.device` implements `Device` with CuPy; `kvtransfer.fake` in ordinary memory, for tests.
"""

from typing import Protocol

from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.pieces import Runs


class DeviceBuffer(Protocol):
    """Contiguous bytes in a device's memory, given back with the last reference."""

    @property
    def num_bytes(self) -> int:
        """Length."""
        ...

    @property
    def address(self) -> int:
        """Where they begin, as the device's kernels and other libraries in this process know it."""
        ...


class Device(Protocol):
    """One pool and the device it lies in. Calls return when their copies are done; threads may share it."""

    @property
    def num_bytes(self) -> int:
        """Of the pool."""
        ...

    def pinned(self, num_bytes: int) -> memoryview:
        """Return host memory that the device copies from and to at full speed; nobody has cleared it."""
        ...

    def buffer(self, num_bytes: int) -> DeviceBuffer:
        """Return memory beside the pool; nobody has cleared it."""
        ...

    def gather(self, runs: Runs, target: DeviceBuffer) -> None:
        """Copy runs of the pool to where they say in `target`."""
        ...

    def scatter(self, source: DeviceBuffer, runs: Runs) -> None:
        """Copy runs of `source` to where they say in the pool."""
        ...

    def download(self, source: DeviceBuffer, target: memoryview) -> None:
        """Copy all of `source` to host memory of the same length."""
        ...

    def upload(self, source: memoryview, target: DeviceBuffer) -> None:
        """Copy host memory to a buffer of the same length."""
        ...


class DeviceMemory:
    """The pool of a device behind the same calls as one in host memory. Implements `PoolMemory`.

    Pieces pass a buffer on the device and pinned host memory; both are as large as the piece and live as long, so that
    windows bound them as they bound what other pools stage.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.num_bytes = device.num_bytes

    def staging(self, num_bytes: int) -> memoryview:
        """Return pinned host memory."""
        return self._device.pinned(num_bytes)

    def gather(self, runs: Runs, target: memoryview, stop: Stop) -> None:
        """Bring runs to the host; see `PoolMemory.gather`."""
        _require_running(stop)
        buffer = self._device.buffer(runs.num_bytes)
        self._device.gather(runs.with_targets(runs.packed()), buffer)
        self._device.download(buffer, target)

    def scatter(self, source: memoryview, runs: Runs, stop: Stop) -> None:
        """Bring runs into the pool; see `PoolMemory.scatter`."""
        buffer = self._device.buffer(runs.num_bytes)
        self._device.upload(source, buffer)
        _require_running(stop)  # the last moment: one launch writes a whole piece, and takes microseconds
        self._device.scatter(buffer, runs.with_sources(runs.packed()))


def _require_running(stop: Stop) -> None:
    if stop.is_set:
        raise TransferError("stopped")
