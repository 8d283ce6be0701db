"""The sender's side of one ticket: what was announced, what was acknowledged, and when nobody reads the source."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from baton_pb.v1 import transfer_pb2
from common.errors import BatonError, TransferError, WorkerLostError
from kvtransfer.activity import Activity, Stop
from kvtransfer.coding import Coding
from kvtransfer.interface import PushReport
from kvtransfer.pieces import Piece, are_blocks, block_array
from kvtransfer.ticket import TicketTerms, run_tag, tag_base
from kvtransfer.wire import FrameError, abort_frame


class ReceiverPeer(Protocol):
    """What a push needs of the connection to its receiver."""

    @property
    def transport(self) -> str:
        """Name of the link's transport."""
        ...

    @property
    def last_ack(self) -> float:
        """Loop time of the last Ack of any push on this connection."""
        ...

    @property
    def last_sent(self) -> float:
        """Loop time at which the link last let go of a piece of any push."""
        ...

    @property
    def num_source_blocks(self) -> int:
        """Blocks in the own pool."""
        ...

    def enqueue(self, push: "BlockPush", piece: Piece) -> None:
        """Send a piece when it is its turn."""
        ...

    def give_back(self, num_bytes: int) -> None:
        """Let other pieces use the room of one that is acknowledged or given up."""
        ...

    def send(self, frame: transfer_pb2.TransferFrame) -> None:
        """Send a control frame."""
        ...

    def lose(self, error: BatonError) -> None:
        """Break the connection and its link."""
        ...


class BlockPush:
    """Implements `Push`.

        opening ──Open back──► open ──finish──► finishing ──all acknowledged, Complete there and back──► finished
            │                   │                   │
            └────── fail ───────┴───────────────────┴──► failed ──nothing reads the source──► quiet

    Complete goes out when nobody will read the source any more and while its blocks are still held: it vouches for
    every byte. Where the receiver reads them that is after the last Ack; where the link sends them, once it has taken
    the last one. That is why a failed push may release its blocks as soon as no thread or request of this process
    reads them; a receiver that still copies from them will never believe what it gets.
    """

    def __init__(
        self, peer: ReceiverPeer, terms: TicketTerms, landing_ids: Sequence[int], coding: Coding | None = None
    ) -> None:
        self.terms = terms
        self.coding = coding
        """How pieces travel; None: as they are."""
        self.landing_ids = np.fromiter(landing_ids, np.int64, len(landing_ids))
        self.activity = Activity()
        self.stop = Stop()
        self.is_over = False
        self.waiting: Piece | None = None
        """Announced before the receiver's answer to Open."""
        self.seconds = self.exposed_s = 0.0
        self._num_runs = 0
        self._num_nonces = 0
        self._tag_base = tag_base(terms.transfer_id, terms.secret)
        self._peer = peer
        self._num_queued = 0
        self._num_sent = 0
        self._unacknowledged: dict[int, int] = {}
        self._being_read: set[int] = set()
        """Pieces whose source somebody may still read."""
        self._is_complete_sent = False
        self._num_bytes = 0
        self._is_finishing = False
        self._finishing = 0.0
        self._loop = asyncio.get_running_loop()
        self._started = self._progress = self._loop.time()
        self._lease: asyncio.TimerHandle | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._outcome: asyncio.Future[PushReport] = self._loop.create_future()
        for future in (self._opened, self._outcome):
            future.add_done_callback(lambda done: done.exception())  # they may end while nobody waits
        self.on_over: Callable[[], object] = lambda: None
        """Called when the owner knows the outcome; set by the sender."""

    @property
    def transport(self) -> str:
        """How the bytes travel."""
        return self._peer.transport

    def take_nonce(self) -> int:
        """Return a number that no other piece of this push has."""
        self._num_nonces += 1
        return self._num_nonces

    def announce(self, first: int, block_ids: Sequence[int], layers: range | None = None) -> None:
        """Queue pieces; see `Push.announce`."""
        layers = self.terms.layers if layers is None else layers
        assert not self._is_finishing
        assert 0 <= first <= first + len(block_ids) <= self.terms.num_blocks
        blocks = block_array(block_ids)
        assert are_blocks(blocks, self._peer.num_source_blocks)
        assert self.terms.layers.start <= layers.start < layers.stop <= self.terms.layers.stop
        if blocks:
            self._enqueue(Piece(first, blocks, layers))

    async def opened(self) -> None:
        """Wait until the receiver has accepted the ticket, then queue what was ready; raises what it answered instead.

        If this raises, nobody in this process has begun to read the source, and there is no quiet to be waited for.
        """
        await asyncio.shield(self._opened)
        piece, self.waiting = self.waiting, None
        if piece is not None:
            self._enqueue(piece)

    async def finish(self) -> PushReport:
        """Wait for the confirmation of all pieces; see `Push.finish`."""
        self._is_finishing = True
        self._finishing = self._loop.time()
        self._watch_progress()
        self._complete_if_done()
        report = await asyncio.shield(self._outcome)
        self.on_over()
        return report

    async def abort(self, reason: str) -> None:
        """Give up and wait until it is quiet; see `Push.abort`."""
        self.fail(TransferError(f"aborted by the sender: {reason}"))
        while not await self.activity.quiet(self.terms.sender_lease_s):
            # A frozen peer is noticed earlier; where nothing moves, breaking the link ends what is under way.
            if self._loop.time() - self._peer.last_sent >= self.terms.sender_lease_s:
                self._peer.lose(TransferError(f"a piece is stuck {self.terms.sender_lease_s} s after an abort"))
        self.on_over()

    def fail(self, error: BatonError, tell_receiver: bool = True) -> None:
        """End with an error, unless it is over."""
        if self.is_over:
            return
        self._end()
        self.stop.set()
        self._outcome.set_exception(error)
        if not self._opened.done():
            self._opened.set_exception(error)
        self._peer.give_back(sum(self._unacknowledged.values()))
        self._unacknowledged.clear()
        if tell_receiver:
            self._peer.send(abort_frame(self.terms.transfer_id, error))

    def announce_when_open(self, block_ids: Sequence[int]) -> None:
        """Queue what is final already, all layers of the first landing blocks, as soon as the receiver accepts."""
        assert len(block_ids) <= self.terms.num_blocks
        blocks = block_array(block_ids)
        assert are_blocks(blocks, self._peer.num_source_blocks)
        self.waiting = Piece(0, blocks, self.terms.layers) if blocks else None

    def number_waiting(self, num_bytes: int) -> transfer_pb2.Ready:
        """Number what waits for the receiver's answer, because it goes out with the question."""
        piece, self.waiting = self.waiting, None
        assert piece is not None
        self._watch_progress()
        self.queued(1)
        return self.number(piece, num_bytes, num_tags=1)

    def accepted(self) -> None:
        """Note the receiver's answer to Open."""
        if not self._opened.done():
            self._opened.set_result(None)

    def queued(self, count: int) -> None:
        """Note that so many pieces wait to be sent."""
        self._num_queued += count

    def number(self, piece: Piece, num_bytes: int, num_tags: int) -> transfer_pb2.Ready:
        """Number a queued piece, which has to be sent now.

        Args:
            piece: what the result describes.
            num_bytes: of the piece.
            num_tags: that its runs use up.
        """
        seq, tag = self._num_sent, run_tag(self._tag_base, self._num_runs)
        self._num_sent += 1
        self._num_queued -= 1
        self._num_runs += num_tags
        self._unacknowledged[seq] = num_bytes
        self._being_read.add(seq)
        return transfer_pb2.Ready(
            transfer_id=self.terms.transfer_id,
            seq=seq,
            first=piece.first,
            layer_begin=piece.layers.start,
            layer_end=piece.layers.stop,
            source_block_ids=piece.block_ids,
            num_bytes=num_bytes,
            tag=tag,
        )

    def source_read(self, seq: int) -> None:
        """Note that the link has a sent piece's bytes, so that the source does not matter to it any more."""
        self._being_read.discard(seq)
        self._complete_if_done()

    def acknowledged(self, seq: int) -> int:
        """Note that a piece is in place, and return its bytes (0: the push is over, nobody counts).

        Raises:
            FrameError: not sent, or acknowledged before.
        """
        if self.is_over:
            return 0
        if seq not in self._unacknowledged:
            raise FrameError(f"Ack of piece {seq}, which is not under way")
        num_bytes = self._unacknowledged.pop(seq)
        self._being_read.discard(seq)
        self._num_bytes += num_bytes
        self._progress = self._loop.time()
        self._peer.give_back(num_bytes)
        self._complete_if_done()
        return num_bytes

    def completed(self) -> None:
        """Note that the receiver has confirmed everything.

        Raises:
            FrameError: it cannot have.
        """
        if self.is_over:
            return
        if not self._is_complete_sent or self._unacknowledged:
            raise FrameError("Complete from a receiver that has not got everything")
        self._end()
        self.seconds = self._loop.time() - self._started
        self.exposed_s = self._loop.time() - self._finishing
        self._outcome.set_result(PushReport(self.transport, self._num_bytes, self.seconds))

    def _enqueue(self, piece: Piece) -> None:
        if not self.is_over:
            self._watch_progress()
            self._peer.enqueue(self, piece)

    def _complete_if_done(self) -> None:
        if self._is_complete_sent or not self._is_finishing or self.is_over:
            return
        if not self._num_queued and not self._being_read:
            self._is_complete_sent = True
            complete = transfer_pb2.Complete(transfer_id=self.terms.transfer_id, num_pieces=self._num_sent)
            self._peer.send(transfer_pb2.TransferFrame(complete=complete))

    def _watch_progress(self) -> None:
        """Start the sender's lease if nothing was under way: it runs only while the receiver owes an answer."""
        if self._lease is None and not self.is_over:
            self._progress = self._loop.time()
            self._lease = self._loop.call_later(self.terms.sender_lease_s, self._check_lease)

    def _check_lease(self) -> None:
        self._lease = None
        if not (self._is_finishing or self._num_queued or self._unacknowledged):
            return
        # Pieces queued behind those of other pushes wait for the peer as a whole.
        left = max(self._progress, self._peer.last_ack) + self.terms.sender_lease_s - self._loop.time()
        if left > 0:
            self._lease = self._loop.call_later(left, self._check_lease)
        else:
            self.fail(WorkerLostError(f"the receiver made no progress for {self.terms.sender_lease_s} s"))

    def _end(self) -> None:
        self.is_over = True
        if self._lease is not None:
            self._lease.cancel()
