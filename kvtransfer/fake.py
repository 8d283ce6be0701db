"""In-memory stand-ins with the contract of the real thing: a pool without an engine, endpoints without a network.

Bytes really move. `FakeNetwork` holds pieces back, delays them, and fails opens and pieces on demand.
"""

import asyncio
import hmac
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from baton_pb.v1 import transfer_pb2, worker_pb2
from common.errors import BatonError, TransferError, WorkerLostError
from kvtransfer.coverage import Coverage
from kvtransfer.device import Device
from kvtransfer.interface import LandingReport, PushReport
from kvtransfer.layout import BlockLayout
from kvtransfer.ticket import TicketTerms, make_ticket, read_ticket

SMALL_LAYOUT = BlockLayout("fake", "float32", block_tokens=4, num_layers=3, num_kv_heads=2, head_dim=8)


class FakeBlockStore:
    """A pool of plain bytes in a memfd. Implements `BlockStore`."""

    def __init__(self, num_blocks: int = 16, layout: BlockLayout = SMALL_LAYOUT) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        fd = os.memfd_create("baton-fake-pool")
        size = num_blocks * layout.block_bytes
        os.ftruncate(fd, size)
        self.buffer = memoryview(mmap.mmap(fd, size))
        self.memfd: int | None = fd
        self.device: Device | None = None
        weakref.finalize(self, os.close, fd)

    def block(self, block_id: int) -> bytes:
        """Return the bytes of one block."""
        size = self.layout.block_bytes
        return bytes(self.buffer[block_id * size : (block_id + 1) * size])

    def write(self, block_id: int, data: bytes) -> None:
        """Overwrite one block."""
        size = self.layout.block_bytes
        self.buffer[block_id * size : (block_id + 1) * size] = data

    def fill(self, block_id: int, seed: int) -> None:
        """Overwrite one block with bytes that differ between seeds and between places in the block."""
        self.write(block_id, pattern(self.layout.block_bytes, seed))


def pattern(num_bytes: int, seed: int) -> bytes:
    """Return bytes that differ between seeds and between places."""
    place = np.arange(num_bytes)
    return (seed * 31 + place * 7 + place // 251).astype(np.uint8).tobytes()


class FakeNetwork:
    """Joins the fake endpoints of one test."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.open_errors: deque[BatonError] = deque()
        """Raised by the next calls of `open_push`, one each."""
        self.piece_errors: deque[BatonError] = deque()
        """Each fails the transfer of the next piece that moves, at both ends."""
        self.num_ready: list[int] = []
        """Blocks that were ready when a push was opened, for each push so far."""
        self.endpoints: dict[str, FakeEndpoint] = {}
        self._flowing = asyncio.Event()
        self._flowing.set()

    def endpoint(self, worker_id: str, store: FakeBlockStore) -> "FakeEndpoint":
        """Return a new endpoint; it replaces an earlier one of that worker."""
        generation = time.time_ns()
        self.endpoints[worker_id] = FakeEndpoint(self, worker_id, store, generation)
        return self.endpoints[worker_id]

    def hold(self) -> None:
        """Let no piece move until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        """Undo `hold`."""
        self._flowing.set()

    async def piece_may_move(self) -> None:
        """Wait out `hold` and the delay."""
        await self._flowing.wait()
        await asyncio.sleep(self.delay_s)


class FakeEndpoint:
    """Implements `Endpoint` between pools of one process."""

    def __init__(self, network: FakeNetwork, worker_id: str, store: FakeBlockStore, generation: int) -> None:
        self.address = transfer_pb2.TransferAddress(worker_id=worker_id, host_id="fake", generation=generation)
        self.slow_paths: tuple[str, ...] = ()
        self.store = store
        self.network = network
        self.landings: dict[bytes, FakeLanding] = {}
        self.pushes: set[FakePush] = set()
        self.is_dead = False
        self.moved: dict[str, worker_pb2.TransferStats] = {}

    @property
    def num_active(self) -> int:
        """Landings and pushes alive."""
        return len(self.landings) + len(self.pushes)

    def grant(self, block_ids: Sequence[int], first_block: int) -> "FakeLanding":
        """Make a ticket for `block_ids`."""
        ticket = make_ticket(self.address, block_ids, first_block, self.store.layout, lease_s=5.0, checksum=False)
        landing = FakeLanding(self, ticket)
        self.landings[ticket.transfer_id] = landing
        return landing

    async def open_push(self, ticket: transfer_pb2.Ticket, ready: Sequence[int] = ()) -> "FakePush":
        """Begin a push; see `Endpoint.open_push`."""
        terms = read_ticket(ticket, self.store.layout)
        await asyncio.sleep(self.network.delay_s)
        if self.network.open_errors:
            raise self.network.open_errors.popleft()
        receiver = self.network.endpoints.get(ticket.receiver.worker_id)
        if receiver is None or receiver.is_dead or self.is_dead:
            raise WorkerLostError(f"cannot reach {ticket.receiver.worker_id}")
        landing = receiver.landings.get(terms.transfer_id)
        if receiver.address.generation != ticket.receiver.generation or landing is None or landing.push is not None:
            raise TransferError("the receiver does not know this ticket, or it was used")
        if not hmac.compare_digest(landing.ticket.secret, terms.secret):
            raise TransferError("wrong secret")
        push = FakePush(self, landing, terms)
        self.network.num_ready.append(len(ready))
        push.announce(0, ready)
        return push

    def stats(self) -> list[worker_pb2.TransferStats]:
        """Return what was moved, by peer."""
        return list(self.moved.values())

    def count(self, peer: str, num_bytes: int) -> None:
        """Add one piece to the statistics."""
        entry = self.moved.setdefault(peer, worker_pb2.TransferStats(peer_worker_id=peer, transport="fake"))
        entry.bytes += num_bytes
        entry.pieces += 1

    def kill(self) -> None:
        """Die as a process does: the peers see a lost worker at once."""
        self.is_dead = True
        for push in list(self.pushes):
            push.fail(TransferError("the sender is gone"))
        for landing in list(self.landings.values()):
            landing.fail(TransferError("closed"), WorkerLostError("the receiver is gone"))

    async def close(self) -> None:
        """End every transfer."""
        self.kill()
        for push in list(self.pushes):
            await push.abort("closed")
        for landing in list(self.landings.values()):
            await landing.abort("closed")


class FakeLanding:
    """Implements `Landing`."""

    def __init__(self, endpoint: FakeEndpoint, ticket: transfer_pb2.Ticket) -> None:
        self.ticket = ticket
        self.endpoint = endpoint
        self.push: FakePush | None = None
        self.coverage = Coverage(len(ticket.block_ids), range(ticket.layer_begin, ticket.layer_end))
        self._outcome: asyncio.Future[LandingReport] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(lambda f: f.cancelled() or f.exception())  # a landing may end unwatched

    @property
    def is_over(self) -> bool:
        """Whether it landed or failed."""
        return self._outcome.done()

    async def landed(self) -> LandingReport:
        """Wait for the outcome."""
        report = await asyncio.shield(self._outcome)
        self.endpoint.landings.pop(self.ticket.transfer_id, None)
        return report

    async def abort(self, reason: str) -> None:
        """Give up; pieces move in one plain call, so it is quiet at once."""
        self.fail(TransferError(f"aborted by the receiver: {reason}"))
        self.endpoint.landings.pop(self.ticket.transfer_id, None)

    def fail(self, error: BatonError, sender_error: BatonError | None = None) -> None:
        """End both sides with an error, unless it landed."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            if self.push is not None:
                self.push.fail(sender_error or error)

    def complete(self, report: LandingReport) -> None:
        """End with success."""
        if not self._outcome.done():
            self._outcome.set_result(report)


class FakePush:
    """Implements `Push`. One task carries its pieces in the order of announcement."""

    transport = "fake"

    def __init__(self, endpoint: FakeEndpoint, landing: FakeLanding, terms: TicketTerms) -> None:
        landing.push = self
        self._endpoint = endpoint
        self._landing = landing
        self._layers = terms.layers
        self._pieces: asyncio.Queue[tuple[int, list[int], range] | None] = asyncio.Queue()
        self._num_bytes = 0
        self._started = time.monotonic()
        self._finishing = False
        self._outcome: asyncio.Future[PushReport] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._mover = asyncio.create_task(self._move_pieces())
        endpoint.pushes.add(self)

    def announce(self, first: int, block_ids: Sequence[int], layers: range | None = None) -> None:
        """Queue one piece."""
        assert not self._finishing
        assert all(0 <= block < self._endpoint.store.num_blocks for block in block_ids)
        if block_ids and not self._outcome.done():
            self._pieces.put_nowait((first, list(block_ids), self._layers if layers is None else layers))

    async def finish(self) -> PushReport:
        """Wait until all pieces are in place."""
        self._finishing = True
        self._pieces.put_nowait(None)
        report = await asyncio.shield(self._outcome)
        self._endpoint.pushes.discard(self)
        return report

    async def abort(self, reason: str) -> None:
        """Give up."""
        self.fail(TransferError(f"aborted by the sender: {reason}"))
        self._mover.cancel()
        await asyncio.wait([self._mover])
        self._endpoint.pushes.discard(self)

    def fail(self, error: BatonError) -> None:
        """End both sides with an error, unless finished."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._mover.cancel()
            self._landing.fail(TransferError(error.message))

    async def _move_pieces(self) -> None:
        while (piece := await self._pieces.get()) is not None:
            await self._endpoint.network.piece_may_move()
            try:
                if self._endpoint.network.piece_errors:
                    raise self._endpoint.network.piece_errors.popleft()
                self._move(*piece)
            except BatonError as error:
                self.fail(error)
                return
        if missing := self._landing.coverage.num_missing:
            self.fail(TransferError(f"{missing} landing blocks were never sent"))
        elif not self._outcome.done():
            seconds = time.monotonic() - self._started
            self._landing.complete(LandingReport(self.transport, self._num_bytes, seconds))
            self._outcome.set_result(PushReport(self.transport, self._num_bytes, seconds))

    def _move(self, first: int, block_ids: list[int], layers: range) -> None:
        """Copy one piece; plain code, so an abort happens before or after it."""
        self._landing.coverage.add(first, len(block_ids), layers)
        receiver = self._landing.endpoint
        block_bytes, layer_bytes = receiver.store.layout.block_bytes, receiver.store.layout.layer_bytes
        size = len(layers) * layer_bytes
        for source, target in zip(block_ids, self._landing.ticket.block_ids[first:], strict=False):
            at = target * block_bytes + layers.start * layer_bytes
            begin = source * block_bytes + layers.start * layer_bytes
            receiver.store.buffer[at : at + size] = self._endpoint.store.buffer[begin : begin + size]
        self._num_bytes += size * len(block_ids)
        self._endpoint.count(receiver.address.worker_id, size * len(block_ids))
        receiver.count(self._endpoint.address.worker_id, size * len(block_ids))
