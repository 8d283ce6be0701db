"""The connection to one receiver: handshake, window, and the pieces of all pushes in the order of announcement."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from baton_pb.v1 import transfer_pb2
from common.errors import BatonError, MismatchError, TransferError, WorkerLostError
from common.logs import log
from kvtransfer.codecs.choice import LOSSLESS, CodecChoice
from kvtransfer.codecs.registry import CODECS, RAW
from kvtransfer.coding import Coded, Coding, Parcel, code
from kvtransfer.counters import TransferCounters
from kvtransfer.layout import BlockLayout, require_equal
from kvtransfer.memory import OwnPool, checksum_of
from kvtransfer.packing import pack
from kvtransfer.piece_queue import PieceQueue
from kvtransfer.pieces import PLAIN_BYTES_MAX, Piece, Runs, piece_bytes, runs_of
from kvtransfer.probe import NUM_PROBES, probe_bytes, probe_frame, rate_of, scratch
from kvtransfer.push import BlockPush
from kvtransfer.seal import Seal
from kvtransfer.ticket import TicketTerms
from kvtransfer.transports.base import OutboundLink
from kvtransfer.wire import PROTOCOL, FrameConnection, FrameError, error_of_abort

logger = logging.getLogger(__name__)


class Greeter(NamedTuple):
    """What a dialer needs to turn a socket into a peer."""

    pool: OwnPool
    hello: transfer_pb2.Hello
    counters: TransferCounters
    inflight_bytes_max: int


class OutboundPeer:
    """The connection to one receiver. Implements `ReceiverPeer` for the pushes on it.

    Its pushes take turns, a piece each, while at most `inflight_bytes_max` are unacknowledged (one piece always may).
    Each receiver has its own, so a slow one holds up nobody else.
    """

    def __init__(self, address: transfer_pb2.TransferAddress, greeter: Greeter, sock: socket.socket, name: str) -> None:
        self.transport = name
        self.last_ack = self.last_sent = 0.0
        self.lost_by: BatonError | None = None
        """Why the connection has ended; the receiver's own words where it gave any."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called once when the connection has ended; set by the sender."""
        self._address = address
        self._greeter = greeter
        self._link: OutboundLink | None = None
        self._pushes: dict[bytes, BlockPush] = {}
        self._queue = PieceQueue(greeter.pool.layout)
        self._inflight_bytes = 0
        self._window_bytes = greeter.inflight_bytes_max
        self._is_in_device = False
        """Whether one of the pools is."""
        self._is_pumping = False
        self._loop = asyncio.get_running_loop()
        self._choice = CodecChoice(self._loop.time())
        self._codec = RAW
        """Of the last transfer."""
        self._hello: asyncio.Future[transfer_pb2.Hello] = self._new_hello()
        self._probed: asyncio.Future[transfer_pb2.Probe] | None = None
        self._connection = FrameConnection(sock, self._on_frame, self._on_lost)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return self.lost_by is not None

    @property
    def num_source_blocks(self) -> int:
        """Blocks in the own pool."""
        return self._greeter.pool.num_blocks

    async def greet(self, fds: Sequence[int] = ()) -> bytes:
        """Exchange Hellos; return what the receiver's says to this transport.

        Raises:
            MismatchError: another protocol or layout.
            TransferError: another worker or another life of it answers there, or it refuses.
            WorkerLostError: the connection broke.
        """
        self._connection.send(transfer_pb2.TransferFrame(hello=self._greeter.hello), fds)
        hello = await self.next_hello()
        if hello.protocol != PROTOCOL:
            raise MismatchError(f"transfer protocol is {PROTOCOL} here and {hello.protocol} there")
        require_equal(self._greeter.pool.layout, BlockLayout.from_pb(hello.layout))
        if (hello.worker_id, hello.generation) != (self._address.worker_id, self._address.generation):
            raise TransferError(f"the ticket is of an earlier life of {self._address.worker_id}, or of another worker")
        self._is_in_device = hello.in_device or self._greeter.hello.in_device
        if hello.window_bytes:
            self._window_bytes = min(self._window_bytes, hello.window_bytes)
        return hello.extra

    async def next_hello(self) -> transfer_pb2.Hello:
        """Wait for the receiver's next Hello; raises a `BatonError` if the connection ends first."""
        hello = await self._hello
        if not self.is_lost:
            self._hello = self._new_hello()
        return hello

    def start(self, link: OutboundLink) -> None:
        """Carry pieces over `link` from now on."""
        self._link = link
        if link.byte_sender is None and not link.has_checksums:
            self._queue.part_bytes_max = PLAIN_BYTES_MAX
        if self.is_lost:
            link.close()

    async def probe(self) -> float | None:
        """Measure the link; return bytes per second, None if the pool is too small to tell. Before any push.

        Raises:
            WorkerLostError: the connection broke.
        """
        assert self._link is not None
        rate = None
        if not (num_bytes := probe_bytes(self._greeter.pool.memory.num_bytes)):
            return None
        filler = scratch(num_bytes)  # the pool's bytes are nobody's business: what crosses a wire may have to be sealed
        for _ in range(NUM_PROBES):
            self._probed = self._loop.create_future()
            probe = probe_frame(num_bytes)
            self.send(transfer_pb2.TransferFrame(probe=probe))
            if self._link.byte_sender is not None:
                sending = self._link.byte_sender.send_bytes(filler, probe.tag)
                sending.add_done_callback(lambda done: done.exception())
            rate = rate_of(await self._probed)
        self._choice.link_rate = rate
        self._greeter.counters.probed(self._address.worker_id, self.transport, rate or 0.0)
        return rate

    def begin(self, terms: TicketTerms, landing_ids: Sequence[int], ready: Sequence[int] = ()) -> BlockPush:
        """Ask the receiver to accept a ticket, and tell it of what is `ready` as soon as possible."""
        if self.is_lost:
            raise WorkerLostError(f"the connection to {self._address.worker_id} is lost")
        if terms.transfer_id in self._pushes:
            raise TransferError("this ticket is in use")
        coding = self._coding(terms)
        push = self._pushes[terms.transfer_id] = BlockPush(self, terms, landing_ids, coding)
        codec = RAW if coding is None else coding.codec.name
        opening = transfer_pb2.Open(transfer_id=terms.transfer_id, secret=terms.secret, codec=codec)
        push.announce_when_open(ready)
        if num_bytes := self._takes_with_open(push):
            self._inflight_bytes += num_bytes
            opening.ready.CopyFrom(push.number_waiting(num_bytes))
        self.send(transfer_pb2.TransferFrame(open=opening))
        return push

    def enqueue(self, push: BlockPush, piece: Piece) -> None:
        """Send a piece, cut to size, when it is its turn: at once if nothing is under way."""
        self._queue.put(push, piece)
        if not self._inflight_bytes:
            self._pump()
        elif not self._is_pumping:  # what is announced in one go travels together
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def give_back(self, num_bytes: int) -> None:
        """Let other pieces use the room of one that is acknowledged or given up."""
        self._inflight_bytes -= num_bytes
        assert self._inflight_bytes >= 0
        self._pump()

    def send(self, frame: transfer_pb2.TransferFrame) -> None:
        """Send a control frame."""
        self._greeter.counters.framed(self._address.worker_id, self.transport)
        self._connection.send(frame)

    def lose(self, error: BatonError) -> None:
        """Break the connection and its link; pushes on it fail."""
        if not self._connection.is_closed:
            self._connection.close()
            self._on_lost(error)

    def ping(self, now: float, idle_s: float, dead_s: float) -> None:
        """See `Sender.ping`."""
        if now - self._connection.last_received >= dead_s:
            self.lose(WorkerLostError(f"the receiver said nothing for {dead_s} s"))
        elif now - self._connection.last_sent >= idle_s:
            self.send(transfer_pb2.TransferFrame(ping=transfer_pb2.Ping()))

    def _pump(self) -> None:
        """Send what the window allows, a piece of each push in turn."""
        self._is_pumping = False
        while self._queue and not self.is_lost:
            room = self._window_bytes - self._inflight_bytes if self._inflight_bytes else None
            if (part := self._queue.take(room)) is None:
                return
            self._inflight_bytes += part.num_bytes
            self._start(*part)

    def _takes_with_open(self, push: BlockPush) -> int:
        """Return the bytes of what waits for a push to open, if Open can announce it: in one piece, read in place."""
        link, piece = self._link, push.waiting
        if piece is None or link is None or link.byte_sender is not None or self._queue or self._inflight_bytes:
            return 0
        is_hashed = push.terms.checksum and link.has_checksums
        is_one_part = self._queue.is_one_part(piece)
        return piece_bytes(piece, self._greeter.pool.layout) if is_one_part and not is_hashed else 0

    def _coding(self, terms: TicketTerms) -> Coding | None:
        """Choose how a transfer's pieces travel; where the receiver reads the pool itself, there is no choice."""
        assert self._link is not None
        if self._link.byte_sender is None:
            return None
        codec = self._choice.choose(terms.codec)
        if codec != self._codec:
            log(
                logger, logging.INFO, "codec of transfers", worker_id=self._address.worker_id, codec=codec,
                link_bytes_per_s=self._choice.link_rate,
            )  # fmt: skip
            self._codec = codec
        has_runs = self._link.takes_devices or not self._is_in_device
        if codec == RAW and not terms.sealed and has_runs:
            return None
        seal = Seal(terms.transfer_id, terms.secret) if terms.sealed else None
        return Coding(CODECS[codec], seal, terms.checksum and seal is None)

    def _start(self, push: BlockPush, piece: Piece, num_bytes: int) -> None:
        assert self._link is not None
        if self._link.byte_sender is None and not (push.terms.checksum and self._link.has_checksums):
            self.send(transfer_pb2.TransferFrame(ready=push.number(piece, num_bytes, num_tags=1)))
            return
        self._choice.sent(self._loop.time())
        runs = runs_of(piece, push.landing_ids, self._greeter.pool.layout)
        if push.coding is not None:
            self._start_coding(push, push.coding, Parcel(piece, runs, push.take_nonce()), num_bytes)
            return
        has_checksum = push.terms.checksum and self._link.has_checksums
        is_message = runs.are_packed and self._link.byte_sender is not None and not self._link.takes_devices
        if not (has_checksum or is_message):
            self._send_piece(push, piece, runs, None, 0)
            return
        pool = self._greeter.pool
        push.activity.begin()
        in_thread = partial(self._loop.run_in_executor, pool.threads)
        message = pool.host.spare.take(num_bytes) if is_message else None
        if message is not None:
            preparing = in_thread(pack, pool.host, runs, message, has_checksum, push.stop)
        else:
            preparing = in_thread(checksum_of, pool.host, runs.sources, runs.sizes, push.stop)
        preparing.add_done_callback(partial(self._prepared, push, piece, runs, message))

    def _prepared(
        self, push: BlockPush, piece: Piece, runs: Runs, message: memoryview | None, preparing: asyncio.Future[int]
    ) -> None:
        """Send a piece that was hashed, and packed if it is to be a message."""
        push.activity.end()
        error = preparing.exception()
        if push.is_over or error is not None:
            if message is not None:
                self._greeter.pool.host.spare.give(message)
            self.give_back(runs.num_bytes)
            push.fail(TransferError(f"a piece could not be prepared: {error!r}"))
        else:
            self._send_piece(push, piece, runs, message, preparing.result())

    def _start_coding(self, push: BlockPush, coding: Coding, parcel: Parcel, num_bytes: int) -> None:
        pool = self._greeter.pool
        push.activity.begin()
        working = self._loop.run_in_executor(pool.threads, code, coding, pool.memory, pool.layout, parcel, push.stop)
        working.add_done_callback(partial(self._coded, push, coding, parcel, num_bytes))

    def _coded(
        self, push: BlockPush, coding: Coding, parcel: Parcel, num_bytes: int, working: asyncio.Future[Coded]
    ) -> None:
        push.activity.end()
        error = working.exception()
        if push.is_over or error is not None:
            self.give_back(num_bytes)
            push.fail(error if isinstance(error, TransferError) else TransferError(f"coding failed: {error!r}"))
            return
        coded = working.result()
        if coding.codec.name == LOSSLESS:
            self._choice.coded(num_bytes, coded.data.nbytes, coded.seconds)
        ready = push.number(parcel.piece, num_bytes, num_tags=1)
        ready.checksum, ready.encoded_bytes, ready.nonce = coded.checksum, coded.data.nbytes, parcel.nonce
        self.send(transfer_pb2.TransferFrame(ready=ready))
        assert self._link is not None
        assert self._link.byte_sender is not None
        self._watch_sending(push, ready.seq, self._link.byte_sender.send_bytes(coded.data, ready.tag))

    def _send_piece(self, push: BlockPush, piece: Piece, runs: Runs, message: memoryview | None, checksum: int) -> None:
        assert self._link is not None
        sender = self._link.byte_sender
        ready = push.number(piece, runs.num_bytes, num_tags=1 if sender is None else len(runs))
        ready.checksum = checksum
        self.send(transfer_pb2.TransferFrame(ready=ready))
        if message is not None:
            assert sender is not None
            sending = sender.send_bytes(message, ready.tag)
            sending.add_done_callback(lambda _: self._greeter.pool.host.spare.give(message))
            self._watch_sending(push, ready.seq, sending)
        elif (reading := self._link.send(runs, ready.tag)) is not None:
            self._watch_sending(push, ready.seq, reading)

    def _watch_sending(self, push: BlockPush, seq: int, sending: asyncio.Future[None]) -> None:
        push.activity.begin()
        sending.add_done_callback(partial(self._sent, push, seq))

    def _sent(self, push: BlockPush, seq: int, sending: asyncio.Future[None]) -> None:
        push.activity.end()
        self.last_sent = self._loop.time()
        if (error := sending.exception()) is not None:
            self.lose(WorkerLostError(f"the {self.transport} link to {self._address.worker_id} broke: {error}"))
        else:
            push.source_read(seq)

    def _on_frame(self, frame: transfer_pb2.TransferFrame) -> None:
        self._greeter.counters.framed(self._address.worker_id, self.transport)
        match frame.WhichOneof("frame"):
            case "hello":
                if self._hello.done():
                    raise FrameError("an unexpected Hello")
                self._hello.set_result(frame.hello)
            case "open":
                self._push(frame.open.transfer_id).accepted()
            case "ack":
                self._on_ack(frame.ack)
            case "complete":
                push = self._push(frame.complete.transfer_id)
                push.completed()
                del self._pushes[frame.complete.transfer_id]
                self._greeter.counters.took(self._address.worker_id, self.transport, push.seconds, push.exposed_s)
            case "probe":
                if self._probed is None or self._probed.done():
                    raise FrameError("the answer to a probe that was not made")
                self._probed.set_result(frame.probe)
            case "abort":
                self._on_abort(frame.abort)
            case "ping":
                pass
            case kind:
                raise FrameError(f"{kind} from a receiver")

    def _push(self, transfer_id: bytes) -> BlockPush:
        if (push := self._pushes.get(transfer_id)) is None:
            raise FrameError("a frame for a transfer that is not open on this connection")
        return push

    def _on_ack(self, ack: transfer_pb2.Ack) -> None:
        self.last_ack = self._loop.time()
        push = self._push(ack.transfer_id)
        if num_bytes := push.acknowledged(ack.seq):
            self._greeter.counters.moved(self._address.worker_id, self.transport, num_bytes)
            is_compressed = push.coding is not None and push.coding.codec.name == LOSSLESS
            self._choice.arrived(num_bytes, is_compressed, self._inflight_bytes == 0, self.last_ack)

    def _on_abort(self, abort: transfer_pb2.Abort) -> None:
        """Fail the push, which answers, unless this is itself the answer to its Abort."""
        error = error_of_abort(abort)
        if not abort.transfer_id:
            raise error
        push = self._pushes.pop(abort.transfer_id, None)
        if push is not None:
            push.fail(error)

    def _on_lost(self, error: BatonError) -> None:
        self.lost_by = error
        self.on_lost()
        if isinstance(error, FrameError):
            self._greeter.counters.refused(self._address.worker_id, self.transport)
        log(logger, logging.INFO, f"connection to receiver ended: {error}", worker_id=self._address.worker_id)
        if not self._hello.done():
            self._hello.set_exception(error)
        if self._probed is not None and not self._probed.done():
            self._probed.set_exception(WorkerLostError(f"the connection ended while it was measured: {error}"))
        if self._link is not None:
            self._link.close()
        self._queue.clear()
        pushes, self._pushes = self._pushes, {}
        for push in pushes.values():
            push.fail(WorkerLostError(f"{self._address.worker_id} is lost: {error}"))

    def _new_hello(self) -> asyncio.Future[transfer_pb2.Hello]:
        hello: asyncio.Future[transfer_pb2.Hello] = self._loop.create_future()
        hello.add_done_callback(lambda done: done.cancelled() or done.exception())
        return hello
