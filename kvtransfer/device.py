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

    def part(self, begin: int, num_bytes: int) -> "DeviceBuffer":
        """Return some of the same bytes."""
        ...


class Communicator(Protocol):
    """A way from one device to another, for one sender (rank 0) and one receiver (rank 1). Calls block.

    Both ends name the same buffers' lengths in the same order; nothing else says what belongs to what.
    """

    def send(self, buffer: DeviceBuffer) -> None:
        """Send all bytes; the buffer may be used again afterwards.

        Raises:
            TransferError: broken, or aborted; it cannot be used any more.
        """
        ...

    def receive(self, buffer: DeviceBuffer) -> None:
        """Fill the buffer; see `send`."""
        ...

    def abort(self) -> None:
        """End whatever blocks, from any thread; nothing touches a buffer any more when that has raised."""
        ...


class Communicators(Protocol):
    """Makes communicators."""

    def new_id(self) -> bytes:
        """Return what the other end needs to join. May take a while."""
        ...

    def join(self, name: bytes, rank: int) -> Communicator:
        """Wait until both ranks are there; a wait for somebody who never comes cannot be ended.

        Raises:
            TransferError: it cannot be made.
        """
        ...


class Device(Protocol):
    """One pool and the device it lies in. Calls return when their copies are done; threads may share it."""

    @property
    def num_bytes(self) -> int:
        """Of the pool."""
        ...

    @property
    def identity(self) -> str:
        """Names the device in all of the world: a communicator needs two."""
        ...

    @property
    def communicators(self) -> Communicators | None:
        """The way to other devices; None: there is none."""
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
