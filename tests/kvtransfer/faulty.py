"""A transport inside one process that damages, shortens, or loses messages on demand: real halves, no wire."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from baton_pb.v1 import transfer_pb2, worker_pb2
from common.config import TransferConfig
from common.errors import TransferError
from kvtransfer import native
from kvtransfer.activity import Stop
from kvtransfer.codecs.registry import prepare
from kvtransfer.counters import TransferCounters
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.landing import BlockLanding
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import Memory, own_pool
from kvtransfer.outbound import Greeter, OutboundPeer
from kvtransfer.packing import unpack
from kvtransfer.pieces import Runs
from kvtransfer.push import BlockPush
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import Greeting, LinkOwner
from kvtransfer.wire import PROTOCOL

Damage = Callable[[bytes], bytes | None]
NAME = "faulty"


class Wire:
    """Messages by tag. `damage` sees each one; None loses it. A message of the wrong length ends in an error."""

    def __init__(self) -> None:
        self.damage: Damage = lambda message: message
        self.num_bytes = 0
        self.is_held = False
        """Whether messages wait for `flow`."""
        self.is_lazy = False
        """Whether the sender's pool is read only at `flow`, as by a link whose peer does not keep up."""
        self._unread: list[Callable[[], None]] = []
        self._held: list[tuple[int, bytes]] = []
        self.has_held = asyncio.Event()
        self._arrived: dict[int, bytes] = {}
        self._wanted: dict[int, asyncio.Future[bytes]] = {}

    def flow(self) -> None:
        """Let go of what was held."""
        self.is_held = self.is_lazy = False
        unread, self._unread = self._unread, []
        for read in unread:
            read()
        held, self._held = self._held, []
        for tag, message in held:
            self.put(tag, message)

    @property
    def num_unread(self) -> int:
        """Pieces whose source will still be read."""
        return len(self._unread)

    def read(self, source: Callable[[], None]) -> None:
        """Read a piece's source, now or at `flow`."""
        if self.is_lazy:
            self._unread.append(source)
        else:
            source()

    def put(self, tag: int, message: bytes) -> None:
        if self.is_held:
            self._held.append((tag, message))
            self.has_held.set()
            return
        self.num_bytes += len(message)
        damaged = self.damage(message)
        if damaged is None:
            return
        if tag in self._wanted:
            self._wanted.pop(tag).set_result(damaged)
        else:
            self._arrived[tag] = damaged

    async def take(self, tag: int, buffer: memoryview) -> None:
        if tag not in self._arrived:
            self._wanted[tag] = asyncio.get_running_loop().create_future()
            message = await self._wanted[tag]
        else:
            message = self._arrived.pop(tag)
        if len(message) != buffer.nbytes:
            raise TransferError(f"a message of {len(message)} bytes in place of {buffer.nbytes}")
        buffer[:] = message

    def cut(self) -> None:
        wanted, self._wanted = self._wanted, {}
        for future in wanted.values():
            future.set_exception(TransferError("the wire is cut"))


class FaultyOutbound:
    """Implements `OutboundLink` and `ByteSender`."""

    name = NAME
    has_checksums = True
    takes_devices = False

    def __init__(self, wire: Wire, memory: Memory) -> None:
        self._wire = wire
        self._memory = memory

    @property
    def byte_sender(self) -> "FaultyOutbound":
        return self

    def send(self, runs: Runs, tag: int) -> asyncio.Future[None]:
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def read() -> None:
            for i, run in enumerate(runs):
                self._wire.put(tag + i, bytes(self._memory.view[run.source : run.source + run.num_bytes]))
            sent.set_result(None)

        self._wire.read(read)
        return sent

    def send_bytes(self, data: memoryview, tag: int) -> asyncio.Future[None]:
        self._wire.put(tag, bytes(data))
        return _done()

    def close(self) -> None:
        self._wire.cut()


class FaultyInbound:
    """Implements `InboundLink` and `ByteReceiver`."""

    name = NAME
    has_checksums = True
    takes_devices = False

    def __init__(self, wire: Wire, memory: Memory) -> None:
        self._wire = wire
        self._memory = memory

    @property
    def byte_receiver(self) -> "FaultyInbound":
        return self

    def receive(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        async def take() -> int | None:
            if runs.are_packed:
                message = memoryview(bytearray(runs.num_bytes))
                await self._wire.take(tag, message)
                return unpack(message, self._memory, runs, checksum, stop)
            digest = xxhash.xxh3_64()
            for i, run in enumerate(runs):
                await self._wire.take(tag + i, self._memory.view[run.target : run.target + run.num_bytes])
                digest.update(self._memory.view[run.target : run.target + run.num_bytes])
            return digest.intdigest() if checksum else None

        return asyncio.ensure_future(take())

    def receive_bytes(self, buffer: memoryview, tag: int) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._wire.take(tag, buffer))

    def probe(self, num_bytes: int, tag: int) -> asyncio.Future[None]:
        return self.receive_bytes(memoryview(bytearray(num_bytes)), tag)

    def discard(self, runs: Runs, tag: int) -> None:
        pass

    def discard_bytes(self, num_bytes: int, tag: int) -> None:
        pass

    def close(self) -> None:
        self._wire.cut()


class FaultyDoor:
    """Implements `Door`: a wire for each sender."""

    name = NAME

    def __init__(self, network: "FaultyNetwork", worker_id: str, memory: Memory) -> None:
        self.path = f"\0baton-faulty-{secrets.token_hex(8)}"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.sock.bind(self.path)
        self.sock.listen()
        self._network = network
        self._worker_id = worker_id
        self._memory = memory

    def check(self, sock: socket.socket) -> None:
        pass

    def greet(self, hello: transfer_pb2.Hello, fd: int | None, owner: LinkOwner) -> Greeting:
        wire = self._network.wire(hello.worker_id, self._worker_id)
        return Greeting(FaultyInbound(wire, self._memory), b"", is_up=True)


class FaultyNetwork:
    """Joins the faulty endpoints of one test by a wire for each sender and receiver."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self._wires: dict[tuple[str, str], Wire] = {}

    def wire(self, sender: str, receiver: str) -> Wire:
        """Return the wire from one to the other."""
        return self._wires.setdefault((sender, receiver), Wire())

    def cut(self, worker_id: str) -> None:
        """Cut all wires of one endpoint."""
        for pair, wire in self._wires.items():
            if worker_id in pair:
                wire.cut()


@dataclass(slots=True)
class FaultyDialer:
    """Implements `Dialer`."""

    network: FaultyNetwork

    async def dial(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(sock, self.network.paths[address.worker_id])
        peer = OutboundPeer(address, greeter, sock, NAME)
        await peer.greet()
        wire = self.network.wire(greeter.hello.worker_id, address.worker_id)
        peer.start(FaultyOutbound(wire, greeter.pool.host))
        await peer.probe()
        return peer


class FaultyEndpoint:
    """Implements `Endpoint` by the real halves."""

    def __init__(self, network: FaultyNetwork, worker_id: str, store: BlockStore, config: TransferConfig) -> None:
        native.library()  # as every endpoint does before it grants or pushes: a compiler's seconds are no transfer's
        prepare(config.codec)
        self._threads = ThreadPoolExecutor(2)
        pool = own_pool(store, self._threads)
        hello = transfer_pb2.Hello(
            protocol=PROTOCOL,
            worker_id=worker_id,
            generation=1,
            layout=store.layout.to_pb(),
            num_blocks=store.num_blocks,
        )
        self.address = transfer_pb2.TransferAddress(worker_id=worker_id, generation=1)
        self.slow_paths: tuple[str, ...] = ()
        self.counters = TransferCounters()
        self._network = network
        self.receiver = Receiver(hello, pool, config, self.counters)
        door = FaultyDoor(network, worker_id, pool.host)
        self.path = network.paths[worker_id] = door.path
        self.receiver.listen(door)
        greeter = Greeter(pool, hello, TransferCounters(), config.inflight_bytes_max)
        self.sender = Sender(greeter, FaultyDialer(network), config.connect_timeout_s)

    @property
    def num_active(self) -> int:
        return self.receiver.num_active + self.sender.num_active

    def grant(self, block_ids: Sequence[int], first_block: int) -> BlockLanding:
        return self.receiver.grant(self.address, block_ids, first_block)

    async def open_push(self, ticket: transfer_pb2.Ticket, ready: Sequence[int] = ()) -> BlockPush:
        return await self.sender.open_push(ticket, ready)

    def stats(self) -> list[worker_pb2.TransferStats]:
        return self.counters.snapshot()

    async def close(self) -> None:
        self._network.cut(self.address.worker_id)
        await self.sender.close()
        await self.receiver.close()
        self._threads.shutdown()
        assert self.num_active == 0


@dataclass(slots=True)
class FaultyPair:
    """A sender and a receiver, their pools, and the wire between them."""

    sender: FaultyEndpoint
    receiver: FaultyEndpoint
    source: FakeBlockStore
    target: FakeBlockStore
    wire: Wire

    @property
    def num_refusals(self) -> int:
        return sum(entry.refusals for entry in self.receiver.stats())


@asynccontextmanager
async def faulty_pair(
    num_blocks: int = 16, layout: BlockLayout = SMALL_LAYOUT, **settings: object
) -> AsyncIterator[FaultyPair]:
    """Yield a pair with blocks of finite floats in its source."""
    config = TransferConfig.model_validate({"lease_s": 20.0, **settings})
    source, target = FakeBlockStore(num_blocks, layout), FakeBlockStore(num_blocks, layout)
    rng = np.random.default_rng(1)
    for block in range(num_blocks):
        source.write(block, rng.normal(size=layout.block_bytes // 4).astype(np.float32).tobytes())
    network = FaultyNetwork()
    receiver = FaultyEndpoint(network, "receiver", target, config)
    sender = FaultyEndpoint(network, "sender", source, config)
    try:
        yield FaultyPair(sender, receiver, source, target, network.wire("sender", "receiver"))
    finally:
        await sender.close()
        await receiver.close()


def _done() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
