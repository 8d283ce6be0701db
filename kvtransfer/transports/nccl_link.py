"""Pieces from GPU to GPU over a communicator of two ranks. What surrounds them: see `nccl`."""

import asyncio
import contextlib
import queue
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

from common.errors import BatonError, TransferError, WorkerLostError
from kvtransfer.activity import Stop
from kvtransfer.device import Communicator, Communicators, Device, DeviceBuffer
from kvtransfer.pieces import Runs
from kvtransfer.probe import scratch
from kvtransfer.transports.base import LinkOwner

NAME = "nccl"
TRAILER = struct.Struct("<QQ")
"""Behind each message: its tag and length, so that ends which disagree on what is next notice it."""
T = TypeVar("T")
_SENDER, _RECEIVER = 0, 1


class _UnwantedError(TransferError):
    """A piece came that nobody wants any more; the link is whole."""


class Lane:
    """One thread that joins a communicator and then makes calls on it, one after another. Owned by a link's loop.

    The thread is a daemon: a peer that dies while both join leaves it waiting for ever, with no buffer of the pool.
    Windows bound what is queued.
    """

    def __init__(self, communicators: Communicators, name: bytes, rank: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._communicator: Communicator | None = None
        self._is_closed = threading.Event()
        self.joined: asyncio.Future[None] = self._loop.create_future()
        self.joined.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread uses no buffer any more."""
        self._thread = threading.Thread(target=self._run, args=(communicators, name, rank), daemon=True)
        self._thread.start()

    def call(self, act: Callable[[Communicator], T]) -> asyncio.Future[T]:
        """Do something when all before it is done; the future fails with a `TransferError`."""
        done: asyncio.Future[T] = self._loop.create_future()
        done.add_done_callback(lambda over: over.cancelled() or over.exception())  # it may end while nobody waits

        def make() -> None:
            assert self._communicator is not None
            try:
                if self._is_closed.is_set():
                    raise TransferError("the nccl link is closed")
                result = act(self._communicator)
            except TransferError as error:
                self._tell(_fail, done, error)
            except Exception as error:  # foreign code: whatever it raises, the communicator is of no use any more
                self._tell(_fail, done, TransferError(f"nccl: {error!r}"))
            else:
                self._tell(_settle, done, result)

        if self._is_closed.is_set():
            _fail(done, TransferError("the nccl link is closed"))
        else:
            self._calls.put(make)
        return done

    def close(self) -> None:
        """End what blocks and what waits, from another thread: aborting may take a moment."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._calls.put(None)
            if self._communicator is not None:
                threading.Thread(target=self._communicator.abort, daemon=True).start()
            elif not self.joined.done():
                _fail(self.joined, TransferError("the nccl link is closed"))
                _settle(self.ended, None)

    def _run(self, communicators: Communicators, name: bytes, rank: int) -> None:
        try:
            self._communicator = communicators.join(name, rank)
        except Exception as error:  # foreign code, as above
            self._tell(_fail, self.joined, error if isinstance(error, TransferError) else TransferError(repr(error)))
            self._tell(_settle, self.ended, None)
            return
        if self._is_closed.is_set():
            self._communicator.abort()
        self._tell(_settle, self.joined, None)
        while (make := self._calls.get()) is not None:
            make()
        self._tell(_settle, self.ended, None)

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            self._loop.call_soon_threadsafe(what, *arguments)


class NcclLink:
    """What both directions share."""

    name = NAME
    has_checksums = False
    """Bytes stay in devices, where nothing here could hash them; tag and length are compared."""
    takes_devices = True

    def __init__(self, device: Device, communicators: Communicators, name: bytes, rank: int) -> None:
        self.on_closed: Callable[[], object] = lambda: None
        self.lane = Lane(communicators, name, rank)
        self._device = device
        self._is_closed = False

    def close(self) -> None:
        """Abort the communicator; see `OutboundLink.close`."""
        if not self._is_closed:
            self._is_closed = True
            self.lane.close()
            self.on_closed()


class NcclOutbound(NcclLink):
    """Implements `OutboundLink`: gathers runs into a buffer beside the pool and sends that."""

    def __init__(self, device: Device, communicators: Communicators, name: bytes) -> None:
        super().__init__(device, communicators, name, _SENDER)
        self.on_broken: Callable[[BatonError], object] = lambda _: None
        """Called when sending has failed; set by whoever owns the control connection."""

    @property
    def byte_sender(self) -> "NcclOutbound":
        """Itself."""
        return self

    def send(self, runs: Runs, tag: int) -> asyncio.Future[None]:
        """See `OutboundLink.send`."""
        packed = runs.with_targets(runs.packed())
        return self._send(runs.num_bytes, tag, lambda buffer: self._device.gather(packed, buffer))

    def send_bytes(self, data: memoryview, tag: int) -> asyncio.Future[None]:
        """See `ByteSender.send_bytes`."""
        return self._send(data.nbytes, tag, lambda buffer: self._device.upload(data, buffer))

    def _send(self, num_bytes: int, tag: int, fill: Callable[[DeviceBuffer], None]) -> asyncio.Future[None]:
        def act(communicator: Communicator) -> None:
            buffer = self._device.buffer(num_bytes + TRAILER.size)
            fill(buffer.part(0, num_bytes))
            self._device.upload(memoryview(TRAILER.pack(tag, num_bytes)), buffer.part(num_bytes, TRAILER.size))
            communicator.send(buffer)

        sending = self.lane.call(act)
        sending.add_done_callback(self._sent)
        return sending

    def _sent(self, sending: asyncio.Future[None]) -> None:
        if (error := sending.exception()) is not None and not self._is_closed:
            self.close()
            self.on_broken(WorkerLostError(f"the nccl link to the receiver broke: {error}"))


class NcclInbound(NcclLink):
    """Implements `InboundLink`: receives into a buffer beside the pool, and scatters it if it is still wanted."""

    def __init__(self, device: Device, communicators: Communicators, name: bytes, owner: LinkOwner) -> None:
        super().__init__(device, communicators, name, _RECEIVER)
        self._owner = owner
        self.lane.joined.add_done_callback(self._joined)

    @property
    def byte_receiver(self) -> "NcclInbound":
        """Itself."""
        return self

    def receive(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:  # noqa: ARG002
        """See `InboundLink.receive`."""

        def act(communicator: Communicator) -> int | None:
            buffer = self._received(communicator, runs.num_bytes, tag)
            if stop.is_set:
                raise _UnwantedError("stopped")
            self._device.scatter(buffer, runs.with_sources(runs.packed()))
            return None

        return self._watched(self.lane.call(act))

    def receive_bytes(self, buffer: memoryview, tag: int) -> asyncio.Future[None]:
        """See `ByteReceiver.receive_bytes`."""
        return self._watched(
            self.lane.call(
                lambda communicator: self._device.download(self._received(communicator, buffer.nbytes, tag), buffer)
            )
        )

    def probe(self, num_bytes: int, tag: int) -> asyncio.Future[None]:
        """Receive; see `InboundLink.probe`."""
        return self.receive_bytes(scratch(num_bytes), tag)

    def discard(self, runs: Runs, tag: int) -> None:
        """Receive it and forget it."""
        self.discard_bytes(runs.num_bytes, tag)

    def discard_bytes(self, num_bytes: int, tag: int) -> None:
        """Receive it and forget it."""

        def act(communicator: Communicator) -> None:
            self._received(communicator, num_bytes, tag)

        self._watched(self.lane.call(act))

    def _received(self, communicator: Communicator, num_bytes: int, tag: int) -> DeviceBuffer:
        buffer = self._device.buffer(num_bytes + TRAILER.size)
        communicator.receive(buffer)
        trailer = self._device.pinned(TRAILER.size)
        self._device.download(buffer.part(num_bytes, TRAILER.size), trailer)
        if TRAILER.unpack(trailer) != (tag, num_bytes):
            raise TransferError("a message came that was not announced next")
        return buffer.part(0, num_bytes)

    def _joined(self, joining: asyncio.Future[None]) -> None:
        if (error := joining.exception()) is None:
            if not self._is_closed:
                self._owner.link_is_up()
        else:
            self._break(error)

    def _watched(self, receiving: asyncio.Future[T]) -> asyncio.Future[T]:
        def over(done: asyncio.Future[T]) -> None:
            if (error := done.exception()) is not None and not isinstance(error, _UnwantedError):
                self._break(error)

        receiving.add_done_callback(over)
        return receiving

    def _break(self, error: BaseException) -> None:
        if not self._is_closed:
            self.close()
            self._owner.lose(TransferError(f"the nccl link to the sender broke: {error}"))


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
