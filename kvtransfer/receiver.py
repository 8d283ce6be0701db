"""The receiving half of an endpoint: grants tickets, accepts senders' connections, checks every frame they send."""

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial

from baton_pb.v1 import transfer_pb2
from common.config import TransferConfig
from common.errors import BatonError, MismatchError, TransferError, UnauthenticatedError
from common.logs import log
from kvtransfer.codecs.registry import RAW, codec_for
from kvtransfer.counters import UNKNOWN, TransferCounters
from kvtransfer.landing import BlockLanding
from kvtransfer.layout import BlockLayout, require_equal
from kvtransfer.memory import OwnPool
from kvtransfer.probe import NUM_PROBES, PROBE_BYTES, rate_of
from kvtransfer.ticket import make_ticket
from kvtransfer.transports.base import Door, Greeting, InboundLink
from kvtransfer.windows import Windows
from kvtransfer.wire import PROTOCOL, FrameConnection, FrameError, abort_frame

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
NUM_BLOCKS_MAX = 1 << 31


class Receiver:
    """All landings of one worker. Owned by its loop.

    Args:
        hello: of this endpoint, without what only one connection is told.
        pool: the own one.
        config: what tickets ask for. A connection that has opened none after `connect_timeout_s` is closed.
        counters: shared with the sending half.
    """

    def __init__(
        self, hello: transfer_pb2.Hello, pool: OwnPool, config: TransferConfig, counters: TransferCounters
    ) -> None:
        self.hello = hello
        self.layout: BlockLayout = pool.layout
        self.connect_timeout_s = config.connect_timeout_s
        self.counters = counters
        self.windows = Windows(config.staging_bytes_max, config.inflight_bytes_max, pool.layout.block_bytes)
        self._pool = pool
        self._config = config
        self._granted: dict[bytes, BlockLanding] = {}
        self._alive: dict[bytes, BlockLanding] = {}
        self._peers: set[InboundPeer] = set()
        self._doors: list[Door] = []
        self._loop = asyncio.get_running_loop()

    @property
    def num_active(self) -> int:
        """Landings that may still be written to, or whose owner has not been told the outcome."""
        return len(self._alive)

    def grant(self, address: transfer_pb2.TransferAddress, block_ids: Sequence[int], first_block: int) -> BlockLanding:
        """Make a ticket for reserved blocks; see `Endpoint.grant`."""
        config, layout = self._config, self.layout
        codec = codec_for(layout, config.codec)
        ticket = make_ticket(
            address, block_ids, first_block, layout, config.lease_s, config.checksum, codec, config.sealed
        )
        key = ticket.transfer_id
        landing = BlockLanding(
            ticket,
            self._pool,
            on_failed=partial(self._granted.pop, key, None),
            on_over=partial(self._alive.pop, key, None),
        )
        self._granted[key] = self._alive[key] = landing
        return landing

    def listen(self, door: Door) -> None:
        """Accept the senders of one transport."""
        self._doors.append(door)
        self._loop.add_reader(door.sock, self._accept, door)

    def take(self, transfer_id: bytes, secret: bytes) -> BlockLanding:
        """Use up a ticket.

        Raises:
            TransferError: unknown, used, given up, or the wrong secret.
        """
        landing = self._granted.get(transfer_id)
        if landing is None:
            raise TransferError("the receiver does not know this ticket, or it was used or given up")
        if not hmac.compare_digest(landing.ticket.secret, secret):
            raise TransferError("wrong secret for this ticket")
        del self._granted[transfer_id]
        return landing

    def forget(self, peer: "InboundPeer") -> None:
        """Drop a connection that has ended."""
        self._peers.discard(peer)

    def ping(self, now: float, idle_s: float, dead_s: float) -> None:
        """Keep connections alive that said nothing for `idle_s`; end those that heard nothing for `dead_s`."""
        for peer in list(self._peers):
            peer.ping(now, idle_s, dead_s)

    async def close(self) -> None:
        """End every landing and connection; returns when nothing writes to the pool."""
        doors, self._doors = self._doors, []
        for door in doors:
            self._loop.remove_reader(door.sock)
            door.sock.close()
        landings = list(self._alive.values())
        for landing in landings:
            landing.fail(TransferError("the receiver closes"))
        for peer in list(self._peers):
            peer.lose(TransferError("the receiver closes"))
        for landing in landings:
            await landing.abort("the receiver closes")

    def _accept(self, door: Door) -> None:
        try:
            sock, _ = door.sock.accept()
        except OSError:  # gone again, or out of descriptors: the next event tries again
            return
        try:
            sock.setblocking(False)
            door.check(sock)
            if len(self._peers) >= CONNECTIONS_MAX:
                raise TransferError(f"{CONNECTIONS_MAX} connections are open")
        except (BatonError, OSError) as error:
            sock.close()
            self.counters.refused(UNKNOWN, door.name)
            log(logger, logging.WARNING, f"refused a connection: {error}", transport=door.name)
            return
        self._peers.add(InboundPeer(self, door, sock))


class InboundPeer:
    """One sender's connection. Implements `SenderPeer` for the landings that are open on it.

    Order: its Hello, ours, (the data channel), then any number of transfers: Open, Ready..., Complete, or Abort from
    either side. A frame out of place closes the connection, and only it.
    """

    def __init__(self, receiver: Receiver, door: Door, sock: socket.socket) -> None:
        self.worker_id = UNKNOWN
        self.num_blocks = 0
        self.has_messages = False
        self.last_piece = 0.0
        self._receiver = receiver
        self._door = door
        self._link: InboundLink | None = None
        self._window_bytes = 0
        self._num_under_way_bytes = 0
        self._is_up = False
        self._is_trusted = False
        self._num_probes = 0
        self._landings: dict[bytes, BlockLanding] = {}
        self._connection = FrameConnection(sock, self._on_frame, self._on_lost)
        loop = asyncio.get_running_loop()
        self._probation = loop.call_later(receiver.connect_timeout_s, self._end_probation)

    @property
    def link(self) -> InboundLink:
        """Brings pieces across."""
        assert self._link is not None
        return self._link

    @property
    def last_received(self) -> float:
        """Loop time of the last sign of life."""
        return self._connection.last_received

    def send(self, frame: transfer_pb2.TransferFrame) -> None:
        """Send a control frame."""
        self._receiver.counters.framed(self.worker_id, self._door.name)
        self._connection.send(frame)

    def lose(self, error: BatonError) -> None:
        """Break the connection and its link; landings open on it fail."""
        if not self._connection.is_closed:
            self._connection.close()
            self._on_lost(error)

    def take_window(self, num_bytes: int) -> None:
        """Count bytes under way; see `SenderPeer.take_window`. Where nothing is kept for them, there is no limit."""
        under_way = self._num_under_way_bytes
        if self._window_bytes and under_way and under_way + num_bytes > self._window_bytes:
            raise TransferError(f"{under_way} + {num_bytes} bytes under way, {self._window_bytes} were granted")
        self._num_under_way_bytes += num_bytes

    def give_window(self, num_bytes: int) -> None:
        """Count bytes that have arrived."""
        self._num_under_way_bytes -= num_bytes
        assert self._num_under_way_bytes >= 0

    def confirm(self, transfer_id: bytes, seconds: float) -> None:
        """See `SenderPeer.confirm`."""
        del self._landings[transfer_id]
        self._receiver.counters.took(self.worker_id, self._door.name, seconds)
        self.send(transfer_pb2.TransferFrame(complete=transfer_pb2.Complete(transfer_id=transfer_id)))

    def count_piece(self, num_bytes: int) -> None:
        """Count a verified piece."""
        self._receiver.counters.moved(self.worker_id, self._door.name, num_bytes)

    def count_refusal(self) -> None:
        """Count something that was not believed."""
        self._receiver.counters.refused(self.worker_id, self._door.name)

    def link_is_up(self) -> None:
        """Let pieces pass, and tell the sender by a second Hello."""
        self._is_up = True
        self.send(transfer_pb2.TransferFrame(hello=self._receiver.hello))

    def ping(self, now: float, idle_s: float, dead_s: float) -> None:
        """See `Receiver.ping`."""
        if now - self._connection.last_received >= dead_s:
            self.lose(TransferError(f"the sender said nothing for {dead_s} s"))
        elif now - self._connection.last_sent >= idle_s:
            self.send(transfer_pb2.TransferFrame(ping=transfer_pb2.Ping()))

    def _on_frame(self, frame: transfer_pb2.TransferFrame) -> None:
        kind = frame.WhichOneof("frame")
        if self._link is None and kind != "hello":
            raise FrameError(f"{kind} before Hello")
        self._receiver.counters.framed(self.worker_id, self._door.name)
        match kind:
            case "hello":
                self._on_hello(frame.hello)
            case "open":
                self._on_open(frame.open)
            case "ready":
                self._checked(frame.ready.transfer_id, lambda landing: landing.receive(frame.ready))
            case "complete":
                self._checked(frame.complete.transfer_id, lambda landing: landing.complete(frame.complete.num_pieces))
            case "abort":
                self._on_abort(frame.abort)
            case "probe":
                self._on_probe(frame.probe)
            case "ping":
                pass
            case _:
                raise FrameError(f"{kind} from a sender")

    def _on_hello(self, hello: transfer_pb2.Hello) -> None:
        if self._link is not None:
            raise FrameError("a second Hello")
        greeting = self._greet(hello)
        self.worker_id = hello.worker_id
        self.num_blocks = hello.num_blocks
        is_in_device = hello.in_device or self._receiver.hello.in_device
        self.has_messages = is_in_device and not greeting.link.takes_devices
        self._link = greeting.link
        self._is_up = greeting.is_up
        answer = transfer_pb2.Hello()
        answer.CopyFrom(self._receiver.hello)
        answer.extra = greeting.extra
        answer.window_bytes = self._window_bytes
        self.send(transfer_pb2.TransferFrame(hello=answer))
        log(logger, logging.INFO, "sender connected", worker_id=hello.worker_id, transport=self._door.name)

    def _greet(self, hello: transfer_pb2.Hello) -> Greeting:
        try:
            if hello.protocol != PROTOCOL:
                raise MismatchError(f"transfer protocol is {PROTOCOL} here and {hello.protocol} there")
            require_equal(self._receiver.layout, BlockLayout.from_pb(hello.layout))
            if not 0 < hello.num_blocks <= NUM_BLOCKS_MAX or len(hello.worker_id) > 256:
                raise FrameError("a Hello out of range")
            greeting = self._door.greet(hello, self._connection.take_fd(), self)
            if greeting.link.byte_receiver is not None:
                self._link = greeting.link  # to be closed if no window is left
                self._window_bytes = self._receiver.windows.grant()
            return greeting
        except BatonError as error:
            self.send(transfer_pb2.TransferFrame(hello=self._receiver.hello))
            self.send(abort_frame(b"", error))
            raise

    def _on_open(self, frame: transfer_pb2.Open) -> None:
        if not self._is_up:
            raise FrameError("Open before the data channel is up")
        try:
            landing = self._receiver.take(frame.transfer_id, frame.secret)
        except TransferError as error:
            self.count_refusal()
            log(logger, logging.WARNING, f"refused a ticket: {error}", worker_id=self.worker_id)
            self.send(abort_frame(frame.transfer_id, error))
            return
        self._is_trusted = True
        self._landings[frame.transfer_id] = landing
        try:
            landing.open(self, frame.codec or RAW)
        except TransferError as error:
            self.count_refusal()
            landing.fail(error)
            return
        self.send(transfer_pb2.TransferFrame(open=transfer_pb2.Open(transfer_id=frame.transfer_id)))
        if frame.HasField("ready"):
            if frame.ready.transfer_id != frame.transfer_id or self.link.byte_receiver is not None:
                raise FrameError("an Open with a piece of another transfer, or of one that follows on a wire")
            self._checked(frame.transfer_id, lambda landing: landing.receive(frame.ready))

    def _checked(self, transfer_id: bytes, act: Callable[[BlockLanding], None]) -> None:
        """Let a landing act on a frame; what it refuses ends that transfer only."""
        landing = self._landings.get(transfer_id)
        if landing is None:
            raise FrameError("a frame for a transfer that is not open on this connection")
        try:
            act(landing)
        except TransferError as error:
            self.count_refusal()
            landing.fail(error)

    def _on_abort(self, frame: transfer_pb2.Abort) -> None:
        """Fail the landing, which answers, unless this is itself the answer to its Abort."""
        landing = self._landings.pop(frame.transfer_id, None)
        if landing is not None:
            landing.fail(TransferError(f"the sender gave up: {frame.message}"))

    def _on_probe(self, frame: transfer_pb2.Probe) -> None:
        """Take some bytes to see how long they need; nobody has to be trusted for that, but it has bounds."""
        self._num_probes += 1
        readable = self.num_blocks * self._receiver.layout.block_bytes
        if not self._is_up or self._num_probes > NUM_PROBES or not 0 < frame.num_bytes <= min(readable, PROBE_BYTES):
            raise FrameError(f"probe {self._num_probes} of {frame.num_bytes} bytes")
        begun = asyncio.get_running_loop().time()
        probing = self.link.probe(frame.num_bytes, frame.tag)
        probing.add_done_callback(partial(self._probed, frame.num_bytes, begun))

    def _probed(self, num_bytes: int, begun: float, probing: asyncio.Future[None]) -> None:
        if probing.cancelled() or probing.exception() is not None:
            return  # the link is broken, which ends the connection
        result = transfer_pb2.Probe(num_bytes=num_bytes, seconds=asyncio.get_running_loop().time() - begun)
        self._receiver.counters.probed(self.worker_id, self._door.name, rate_of(result))
        self.send(transfer_pb2.TransferFrame(probe=result))

    def _end_probation(self) -> None:
        if not self._is_trusted:
            self.lose(UnauthenticatedError("no ticket was opened in time"))

    def _on_lost(self, error: BatonError) -> None:
        self._probation.cancel()
        if isinstance(error, FrameError | MismatchError | UnauthenticatedError):
            self.count_refusal()
            log(logger, logging.WARNING, f"closed a connection: {error}", worker_id=self.worker_id)
        if self._link is not None:
            self._link.close()
        self._receiver.windows.give_back(self._window_bytes)
        self._receiver.forget(self)
        landings, self._landings = self._landings, {}
        for landing in landings.values():
            landing.fail(TransferError(f"the sender is lost: {error}"))
