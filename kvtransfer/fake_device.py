"""A device that is ordinary memory, and communicators inside one process: the contract of the real ones, for tests."""

import secrets
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError
from kvtransfer.device import Communicator, Communicators, Device, DeviceBuffer
from kvtransfer.fake import SMALL_LAYOUT, pattern
from kvtransfer.layout import BlockLayout
from kvtransfer.pieces import Runs

LIMIT_S = 60.0
"""Longest wait for the other rank: a test is stuck by then."""


class FakeDeviceStore:
    """A pool in a device that is none. Implements `BlockStore`: what transfers see of it goes through `FakeDevice`."""

    def __init__(
        self,
        num_blocks: int = 16,
        layout: BlockLayout = SMALL_LAYOUT,
        communicators: "FakeCommunicators | None" = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.buffer = memoryview(b"")
        self.memfd: int | None = None
        self._pool = np.zeros((num_blocks, layout.block_bytes), np.uint8)
        self.device: Device | None = FakeDevice(self._pool.reshape(-1), communicators)

    def block(self, block_id: int) -> bytes:
        """Return the bytes of one block."""
        return bytes(self._pool[block_id])

    def write(self, block_id: int, data: bytes) -> None:
        """Overwrite one block."""
        self._pool[block_id] = np.frombuffer(data, np.uint8)

    def fill(self, block_id: int, seed: int) -> None:
        """Overwrite one block; see `FakeBlockStore.fill`."""
        self.write(block_id, pattern(self.layout.block_bytes, seed))


class FakeDeviceBuffer(NamedTuple):
    """Implements `DeviceBuffer` in ordinary memory."""

    bytes: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Length."""
        return self.bytes.nbytes

    @property
    def address(self) -> int:
        """Where they begin."""
        return int(self.bytes.ctypes.data)

    def part(self, begin: int, num_bytes: int) -> "FakeDeviceBuffer":
        """See `DeviceBuffer.part`."""
        return FakeDeviceBuffer(self.bytes[begin : begin + num_bytes])


class FakeDevice:
    """Implements `Device` with numpy: says what the kernel has to do. Fresh memory holds no zeros."""

    def __init__(self, pool: NDArray[np.uint8], communicators: "FakeCommunicators | None" = None) -> None:
        self.identity = secrets.token_hex(8)
        self.communicators: Communicators | None = communicators
        self._pool = pool
        self.num_bytes = pool.nbytes

    def pinned(self, num_bytes: int) -> memoryview:
        """Return ordinary memory."""
        return np.full(num_bytes, 0xA5, np.uint8).data

    def buffer(self, num_bytes: int) -> FakeDeviceBuffer:
        """Return ordinary memory."""
        return FakeDeviceBuffer(np.full(num_bytes, 0x5A, np.uint8))

    def gather(self, runs: Runs, target: DeviceBuffer) -> None:
        """See `Device.gather`."""
        assert isinstance(target, FakeDeviceBuffer)
        _copy(self._pool, target.bytes, runs)

    def scatter(self, source: DeviceBuffer, runs: Runs) -> None:
        """See `Device.scatter`."""
        assert isinstance(source, FakeDeviceBuffer)
        _copy(source.bytes, self._pool, runs)

    def download(self, source: DeviceBuffer, target: memoryview) -> None:
        """See `Device.download`."""
        assert isinstance(source, FakeDeviceBuffer)
        np.asarray(target)[:] = source.bytes

    def upload(self, source: memoryview, target: DeviceBuffer) -> None:
        """See `Device.upload`."""
        assert isinstance(target, FakeDeviceBuffer)
        target.bytes[:] = np.asarray(source)


def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8], runs: Runs) -> None:
    for run in runs:
        target[run.target : run.target + run.num_bytes] = source[run.source : run.source + run.num_bytes]


class FakeCommunicators:
    """Implements `Communicators` between threads of one process."""

    def __init__(self) -> None:
        self._meetings: dict[bytes, _Meeting] = {}

    @property
    def num_joined(self) -> int:
        """Communicators that both ranks have joined so far."""
        return sum(meeting.is_complete for meeting in self._meetings.values())

    def new_id(self) -> bytes:
        """Return a name for a pair."""
        name = secrets.token_bytes(128)
        self._meetings[name] = _Meeting()
        return name

    def join(self, name: bytes, rank: int) -> Communicator:
        """Wait for the other rank."""
        if name not in self._meetings:
            raise TransferError("no such communicator")
        meeting = self._meetings[name]
        meeting.arrive(rank)
        return FakeCommunicator(meeting)

    def abort_all(self) -> None:
        """Break all that there are, as a failing network would."""
        for meeting in self._meetings.values():
            meeting.abort()


class _Meeting:
    """Where two ranks meet: one buffer at a time is held out by the sender and taken by the receiver."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ranks: set[int] = set()
        self._offered: NDArray[np.uint8] | None = None
        self._is_aborted = False

    @property
    def is_complete(self) -> bool:
        """Whether both are there, or were."""
        return len(self._ranks) == 2

    def arrive(self, rank: int) -> None:
        with self._changed:
            self._ranks.add(rank)
            self._changed.notify_all()
            self._wait(lambda: self.is_complete)

    def offer(self, data: NDArray[np.uint8]) -> None:
        with self._changed:
            self._offered = data
            self._changed.notify_all()
            self._wait(lambda: self._offered is None)

    def take(self, target: NDArray[np.uint8]) -> None:
        with self._changed:
            self._wait(lambda: self._offered is not None)
            assert self._offered is not None
            assert self._offered.nbytes == target.nbytes, "the two ranks do not agree on what moves"
            target[:] = self._offered
            self._offered = None
            self._changed.notify_all()

    def abort(self) -> None:
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        assert self._changed.wait_for(lambda: self._is_aborted or is_so(), LIMIT_S)
        if self._is_aborted:
            raise TransferError("the communicator was aborted")


class FakeCommunicator:
    """Implements `Communicator`."""

    def __init__(self, meeting: _Meeting) -> None:
        self._meeting = meeting

    def send(self, buffer: DeviceBuffer) -> None:
        """See `Communicator.send`."""
        assert isinstance(buffer, FakeDeviceBuffer)
        self._meeting.offer(buffer.bytes)

    def receive(self, buffer: DeviceBuffer) -> None:
        """See `Communicator.receive`."""
        assert isinstance(buffer, FakeDeviceBuffer)
        self._meeting.take(buffer.bytes)

    def abort(self) -> None:
        """See `Communicator.abort`. The other end notices too, which a real one may not."""
        self._meeting.abort()
