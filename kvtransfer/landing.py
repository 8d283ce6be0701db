"""The receiver's side of one ticket: what may be written, what was written, and when it is quiet."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from baton_pb.v1 import transfer_pb2
from common.errors import BatonError, TransferError
from kvtransfer.activity import Activity, Stop
from kvtransfer.codecs.registry import CODECS, RAW, is_allowed
from kvtransfer.coding import BadMessageError, Coded, Coding, Parcel, place, slabs_of
from kvtransfer.coverage import Coverage
from kvtransfer.interface import LandingReport
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import OwnPool
from kvtransfer.pieces import PIECE_BLOCKS_MAX, Piece, Runs, are_blocks, block_array, piece_bytes, runs_of
from kvtransfer.seal import Seal
from kvtransfer.ticket import run_tag, tag_base
from kvtransfer.transports.base import InboundLink
from kvtransfer.wire import abort_frame

logger = logging.getLogger(__name__)


class SenderPeer(Protocol):
    """What a landing needs of the connection on which its ticket was opened."""

    worker_id: str
    num_blocks: int
    has_messages: bool
    """Whether each piece travels as one message, because one of the pools lies in a device."""
    last_piece: float
    """Loop time at which the last piece ended, of any landing on this connection; landings write it."""

    @property
    def link(self) -> InboundLink:
        """Brings pieces across."""
        ...

    @property
    def last_received(self) -> float:
        """Loop time of the last sign of life."""
        ...

    def take_window(self, num_bytes: int) -> None:
        """Note that so many bytes more are under way; raises a `TransferError` if that is more than was granted."""
        ...

    def give_window(self, num_bytes: int) -> None:
        """Note that so many bytes are not under way any more, or belong to a transfer that is over."""
        ...

    def send(self, frame: transfer_pb2.TransferFrame) -> None:
        """Send a control frame."""
        ...

    def lose(self, error: BatonError) -> None:
        """Break the connection and its link."""
        ...

    def confirm(self, transfer_id: bytes, seconds: float) -> None:
        """Tell the sender that everything has landed; that was the last of this transfer."""
        ...

    def count_piece(self, num_bytes: int) -> None:
        """Count a verified piece."""
        ...

    def count_refusal(self) -> None:
        """Count something that was not believed."""
        ...


class BlockLanding:
    """Implements `Landing`.

        granted ──Open──► open ──Complete, all in place──► landed
           │               │
           └───── fail ────┴──► failed ──nothing under way──► quiet

    Nothing is believed before Complete, and the sender sends Complete only when nobody will read its blocks any more,
    while it still holds them. So a sender that gave up may overwrite its blocks at once: what this side may still be
    copying is never used, with or without checksums.

    The lease: while nothing is under way, any frame of the sender renews it (it pings each second); a piece that is
    under way must land within it; a ticket that nobody opens lives for one lease.
    """

    def __init__(
        self,
        ticket: transfer_pb2.Ticket,
        pool: OwnPool,
        on_failed: Callable[[], object],
        on_over: Callable[[], object],
    ) -> None:
        self.ticket = ticket
        self.is_over = False
        self.seconds = 0.0
        self._stop = Stop()
        self._pool = pool
        self._layout: BlockLayout = pool.layout
        self._coding: Coding | None = None
        self._placing: set[asyncio.Task[int | None]] = set()
        self._num_under_way_bytes = 0
        self._is_vouched_for = False
        self._landing_ids = np.fromiter(ticket.block_ids, np.int64, len(ticket.block_ids))
        self._coverage = Coverage(len(ticket.block_ids), range(ticket.layer_begin, ticket.layer_end))
        self._activity = Activity()
        self._peer: SenderPeer | None = None
        self._num_pieces = 0
        self._num_runs = 0
        self._tag_base = tag_base(ticket.transfer_id, ticket.secret)
        self._num_bytes = 0
        self._on_failed = on_failed
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._opened = self._progress = self._moving_since = self._loop.time()
        self._moving_s = 0.0
        self._lease = self._loop.call_later(ticket.lease_s, self._check_lease)
        self._outcome: asyncio.Future[LandingReport] = self._loop.create_future()
        self._outcome.add_done_callback(lambda done: done.exception())  # it may end while nobody waits

    async def landed(self) -> LandingReport:
        """Wait for the outcome; see `Landing.landed`."""
        report = await asyncio.shield(self._outcome)
        self._on_over()
        return report

    async def abort(self, reason: str) -> None:
        """Give up and wait until it is quiet; see `Landing.abort`."""
        self.fail(TransferError(f"aborted by the receiver: {reason}"))
        while not await self._activity.quiet(self.ticket.lease_s):
            self._break_if_stuck()
        self._on_over()

    def fail(self, error: BatonError) -> None:
        """End with an error, unless it is over; the sender is told."""
        if self.is_over:
            return
        self._end()
        self._stop.set()
        self._outcome.set_exception(error)
        self._on_failed()
        self._give_window(self._num_under_way_bytes)
        if self._peer is not None:
            self._peer.send(abort_frame(self.ticket.transfer_id, error))

    def open(self, peer: SenderPeer, codec: str) -> None:
        """Bind the ticket to the connection of the sender that showed its secret.

        Raises:
            TransferError: the ticket does not allow this codec; `fail` has to follow.
        """
        assert self._peer is None
        self._peer = peer
        self._opened = self._progress = self._loop.time()
        if not is_allowed(self.ticket.codec, codec):
            raise TransferError(f"codec {codec!r} for a ticket that asks for {self.ticket.codec!r}")
        is_message = codec != RAW or self.ticket.sealed or peer.has_messages
        if peer.link.byte_receiver is not None and is_message:
            seal = Seal(self.ticket.transfer_id, self.ticket.secret) if self.ticket.sealed else None
            self._coding = Coding(CODECS[codec], seal, self.ticket.checksum and seal is None)
        elif codec != RAW:
            raise TransferError(f"codec {codec!r} on a link that carries no coded bytes")

    def receive(self, ready: transfer_pb2.Ready) -> None:
        """Begin to receive a piece; one of a transfer that is over passes by.

        Raises:
            TransferError: out of range, out of order, sent twice. Nothing was begun.
        """
        assert self._peer is not None
        piece = Piece(ready.first, block_array(ready.source_block_ids), range(ready.layer_begin, ready.layer_end))
        runs = self._runs(piece, ready, self._peer.num_blocks)
        self._num_pieces += 1
        is_one_tag = self._coding is not None or self._peer.link.byte_receiver is None
        self._num_runs += 1 if is_one_tag else len(runs)
        if self.is_over:
            self._pass_by(ready, runs)
            return
        self._coverage.add(piece.first, len(piece.block_ids), piece.layers)
        self._peer.take_window(ready.num_bytes)
        self._num_under_way_bytes += ready.num_bytes
        if self._activity.is_quiet:
            self._progress = self._loop.time()
            self._moving_since = self._progress
        self._activity.begin()
        link = self._peer.link
        checksum = None
        if self._coding is not None:
            receiving = self._receive_coded(self._coding, Parcel(piece, runs, ready.nonce), ready)
        else:
            checksum = ready.checksum if self.ticket.checksum and link.has_checksums else None
            receiving = link.receive(runs, ready.tag, checksum is not None, self._stop)
        receiving.add_done_callback(partial(self._piece_done, ready.seq, ready.num_bytes, checksum))

    def complete(self, num_pieces: int) -> None:
        """Note that the sender vouches for all pieces: end with success when the last one is in place.

        Raises:
            TransferError: something is missing; or is still read from the sender's memory, for which it cannot vouch.
        """
        assert self._peer is not None
        if self.is_over:
            return
        is_read_here = self._peer.link.byte_receiver is None
        if num_pieces != self._num_pieces or (is_read_here and not self._activity.is_quiet):
            raise TransferError(f"complete after {num_pieces} pieces, {self._num_pieces} were announced")
        if missing := self._coverage.num_missing:
            raise TransferError(f"complete, but {missing} of {len(self.ticket.block_ids)} blocks were never sent")
        self._is_vouched_for = True
        self._land_if_quiet()

    def _land_if_quiet(self) -> None:
        if not self._is_vouched_for or self.is_over or not self._activity.is_quiet:
            return
        assert self._peer is not None
        self._end()
        self.seconds = self._loop.time() - self._opened
        self._outcome.set_result(LandingReport(self._peer.link.name, self._num_bytes, self.seconds, self._moving_s))
        self._peer.confirm(self.ticket.transfer_id, self.seconds)

    def _pass_by(self, ready: transfer_pb2.Ready, runs: Runs) -> None:
        assert self._peer is not None
        if self._coding is None:
            self._peer.link.discard(runs, ready.tag)
        elif (receiver := self._peer.link.byte_receiver) is not None:
            receiver.discard_bytes(ready.encoded_bytes, ready.tag)

    def _receive_coded(self, coding: Coding, parcel: Parcel, ready: transfer_pb2.Ready) -> asyncio.Future[int | None]:
        assert self._peer is not None
        receiver = self._peer.link.byte_receiver
        assert receiver is not None
        message = self._pool.memory.staging(ready.encoded_bytes)
        arriving = receiver.receive_bytes(message, ready.tag)
        task = self._loop.create_task(self._place(coding, parcel, Coded(message, ready.checksum), arriving))
        self._placing.add(task)
        task.add_done_callback(self._placing.discard)
        return task

    async def _place(self, coding: Coding, parcel: Parcel, coded: Coded, arriving: asyncio.Future[None]) -> int | None:
        await arriving
        pool = self._pool
        await self._loop.run_in_executor(
            pool.threads, place, coding, coded, pool.memory, pool.layout, parcel, self._stop
        )
        return None

    def _runs(self, piece: Piece, ready: transfer_pb2.Ready, num_source_blocks: int) -> Runs:
        if ready.seq != self._num_pieces:
            raise TransferError(f"piece {ready.seq} where {self._num_pieces} was due")
        if ready.tag != run_tag(self._tag_base, self._num_runs):
            raise TransferError(f"piece {ready.seq} under a foreign tag")
        if len(piece.block_ids) > PIECE_BLOCKS_MAX or not are_blocks(piece.block_ids, num_source_blocks):
            raise TransferError("a piece of blocks that the sender's pool does not have")
        self._coverage.check(piece.first, len(piece.block_ids), piece.layers)
        if ready.num_bytes != piece_bytes(piece, self._layout):
            raise TransferError(f"a piece of {ready.num_bytes} bytes, not {piece_bytes(piece, self._layout)}")
        most = 0 if self._coding is None else self._coding.encoded_max(slabs_of(piece, self._layout))
        if not min(1, most) <= ready.encoded_bytes <= most:
            raise TransferError(f"a message of {ready.encoded_bytes} bytes for a piece that takes at most {most}")
        return runs_of(piece, self._landing_ids, self._layout)

    def _piece_done(
        self, seq: int, num_bytes: int, checksum: int | None, receiving: asyncio.Future[int | None]
    ) -> None:
        assert self._peer is not None
        self._activity.end()
        self._peer.last_piece = self._loop.time()
        if self._activity.is_quiet:
            self._moving_s += self._loop.time() - self._moving_since
        error = TransferError("cancelled") if receiving.cancelled() else receiving.exception()
        if self.is_over:
            return
        self._give_window(num_bytes)
        if error is not None:
            if isinstance(error, BadMessageError):
                self._peer.count_refusal()
            self.fail(error if isinstance(error, BatonError) else TransferError(f"piece {seq}: {error!r}"))
        elif receiving.result() != checksum:
            self._peer.count_refusal()
            self.fail(TransferError(f"piece {seq} of {num_bytes} bytes arrived with a wrong checksum"))
        else:
            self._progress = self._loop.time()
            self._num_bytes += num_bytes
            self._peer.count_piece(num_bytes)
            ack = transfer_pb2.Ack(transfer_id=self.ticket.transfer_id, seq=seq)
            self._peer.send(transfer_pb2.TransferFrame(ack=ack))
            self._land_if_quiet()

    def _give_window(self, num_bytes: int) -> None:
        if self._peer is not None and num_bytes:
            self._num_under_way_bytes -= num_bytes
            self._peer.give_window(num_bytes)

    def _break_if_stuck(self) -> None:
        """Break the link if no piece moves on it: that ends what is under way. A frozen peer is noticed earlier."""
        assert self._peer is not None
        if self._loop.time() - self._peer.last_piece >= self.ticket.lease_s:
            logger.error(
                "%d landing blocks are in quarantine: a write is not known to be over", len(self.ticket.block_ids)
            )
            self._peer.lose(TransferError(f"a piece is stuck {self.ticket.lease_s} s after an abort"))

    def _check_lease(self) -> None:
        renewed = self._progress
        if self._peer is not None and self._activity.is_quiet:
            renewed = max(renewed, self._peer.last_received)
        left = renewed + self.ticket.lease_s - self._loop.time()
        if left > 0:
            self._lease = self._loop.call_later(left, self._check_lease)
        else:
            self.fail(TransferError(f"no progress for {self.ticket.lease_s} s"))

    def _end(self) -> None:
        self.is_over = True
        self._lease.cancel()
