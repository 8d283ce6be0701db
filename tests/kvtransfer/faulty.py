"""A transport inside one process that damages, shortens, or loses messages on demand: real halves, no wire."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from baton_pb.v1 import transfer_pb2
from common.config import TransferConfig
from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.counters import TransferCounters
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import Memory, OwnPool
from kvtransfer.outbound import Greeter, OutboundPeer
from kvtransfer.pieces import Runs
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
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
        self._held: list[tuple[int, bytes]] = []
        self._arrived: dict[int, bytes] = {}
        self._wanted: dict[int, asyncio.Future[bytes]] = {}

    def flow(self) -> None:
        """Let go of what was held."""
        self.is_held = False
        held, self._held = self._held, []
        for tag, message in held:
            self.put(tag, message)

    def put(self, tag: int, message: bytes) -> None:
        if self.is_held:
            self._held.append((tag, message))
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

    def __init__(self, wire: Wire, memory: Memory) -> None:
        self._wire = wire
        self._memory = memory

    @property
    def byte_sender(self) -> "FaultyOutbound":
        return self

    def send(self, runs: Runs, tag: int) -> asyncio.Future[None]:
        for i, run in enumerate(runs):
            self._wire.put(tag + i, bytes(self._memory.view[run.source : run.source + run.num_bytes]))
        return _done()

    def send_bytes(self, data: memoryview, tag: int) -> asyncio.Future[None]:
        self._wire.put(tag, bytes(data))
        return _done()

    def close(self) -> None:
        self._wire.cut()


class FaultyInbound:
    """Implements `InboundLink` and `ByteReceiver`."""

    name = NAME
    has_checksums = True

    def __init__(self, wire: Wire, memory: Memory) -> None:
        self._wire = wire
        self._memory = memory

    @property
    def byte_receiver(self) -> "FaultyInbound":
        return self

    def receive(self, runs: Runs, tag: int, checksum: bool, stop: Stop) -> asyncio.Future[int | None]:
        async def take() -> int | None:
            digest = xxhash.xxh3_64()
            for i, run in enumerate(runs):
                await self._wire.take(tag + i, self._memory.view[run.target : run.target + run.num_bytes])
                digest.update(self._memory.view[run.target : run.target + run.num_bytes])
            return digest.intdigest() if checksum else None

        return asyncio.ensure_future(take())

    def receive_bytes(self, buffer: memoryview, tag: int) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._wire.take(tag, buffer))

    def discard(self, runs: Runs, tag: int) -> None:
        pass

    def discard_bytes(self, num_bytes: int, tag: int) -> None:
        pass

    def close(self) -> None:
        self._wire.cut()


class FaultyDoor:
    """Implements `Door`: one wire for all that come."""

    name = NAME

    def __init__(self, wire: Wire, memory: Memory) -> None:
        self.path = f"\0baton-faulty-{secrets.token_hex(8)}"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.sock.bind(self.path)
        self.sock.listen()
        self._wire = wire
        self._memory = memory

    def check(self, sock: socket.socket) -> None:
        pass

    def greet(self, hello: transfer_pb2.Hello, fd: int | None, owner: LinkOwner) -> Greeting:
        return Greeting(FaultyInbound(self._wire, self._memory), b"", is_up=True)


@dataclass(slots=True)
class FaultyDialer:
    """Implements `Dialer`."""

    path: str
    wire: Wire

    async def dial(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(sock, self.path)
        peer = OutboundPeer(address, greeter, sock, NAME)
        await peer.greet()
        peer.start(FaultyOutbound(self.wire, greeter.pool.memory))
        return peer


@dataclass(slots=True)
class FaultyPair:
    """The two halves, their pools, and what is between them."""

    sender: Sender
    receiver: Receiver
    source: FakeBlockStore
    target: FakeBlockStore
    wire: Wire
    address: transfer_pb2.TransferAddress
    counters: TransferCounters

    @property
    def num_refusals(self) -> int:
        return sum(entry.refusals for entry in self.counters.snapshot())


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
    wire, counters = Wire(), TransferCounters()
    with ThreadPoolExecutor(2) as threads:
        pools = [OwnPool(Memory(store.buffer), layout, num_blocks, threads) for store in (source, target)]
        hellos = [
            transfer_pb2.Hello(
                protocol=PROTOCOL, worker_id=name, generation=1, layout=layout.to_pb(), num_blocks=num_blocks
            )
            for name in ("sender", "receiver")
        ]
        receiver = Receiver(hellos[1], pools[1], config, counters)
        door = FaultyDoor(wire, pools[1].memory)
        receiver.listen(door)
        greeter = Greeter(pools[0], hellos[0], TransferCounters(), config.inflight_bytes_max)
        sender = Sender(greeter, FaultyDialer(door.path, wire), config.connect_timeout_s)
        address = transfer_pb2.TransferAddress(worker_id="receiver", generation=1)
        try:
            yield FaultyPair(sender, receiver, source, target, wire, address, counters)
        finally:
            with contextlib.ExitStack() as stack:
                stack.callback(wire.cut)
                await sender.close()
                await receiver.close()
        assert sender.num_active == receiver.num_active == 0


def _done() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
