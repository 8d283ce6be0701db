"""Two TCP connections of a transfer through one relay that does one thing to the bytes, at one place, once."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

from baton_pb.v1 import transfer_pb2

Kind = Literal["delay", "drop", "cut", "duplicate", "corrupt"]
KINDS: tuple[Kind, ...] = ("delay", "drop", "cut", "duplicate", "corrupt")
Stream = Literal["control", "answers", "data"]
READ_BYTES = 1000
DELAY_S = 0.3


class Fault(NamedTuple):
    """What happens when byte `at` of a stream passes; once, on the first connection that gets so far."""

    kind: Kind
    stream: Stream
    at: int


class FaultyWire:
    """Relays a sender's control and data connections to a receiver. Stands in the receiver's address."""

    def __init__(self, receiver: transfer_pb2.TransferAddress) -> None:
        self.fault: Fault | None = None
        self.num_bytes: dict[Stream, int] = {"control": 0, "answers": 0, "data": 0}
        """That have passed on the last connection."""
        self._host, self._control_port = receiver.host, receiver.tcp_port
        self._data_port = 0
        self._doors = [socket.create_server((self._host, 0)) for _ in range(2)]
        for door in self._doors:
            door.setblocking(False)
        self.port: int = self._doors[0].getsockname()[1]
        self._group: asyncio.TaskGroup

    async def run(self) -> None:
        """Relay until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._accept(self._doors[0], is_data=False))
            self._group.create_task(self._accept(self._doors[1], is_data=True))

    def close(self) -> None:
        """Close the doors."""
        for door in self._doors:
            door.close()

    async def _accept(self, door: socket.socket, is_data: bool) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sender, _ = await loop.sock_accept(door)
            self._group.create_task(self._join(sender, is_data))

    async def _join(self, sender: socket.socket, is_data: bool) -> None:
        loop = asyncio.get_running_loop()
        receiver = socket.socket()
        with sender, receiver:
            for end in (sender, receiver):
                end.setblocking(False)
            try:
                port = self._data_port if is_data else self._control_port
                await loop.sock_connect(receiver, (self._host, port))
                ways: list[tuple[Stream, socket.socket, socket.socket]] = [
                    ("data" if is_data else "control", sender, receiver),
                    ("data" if is_data else "answers", receiver, sender),
                ]
                relays = [asyncio.create_task(self._relay(*way)) for way in ways]
                try:
                    await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for relay in relays:
                        relay.cancel()
                    await asyncio.gather(*relays, return_exceptions=True)
            except OSError:
                return

    async def _relay(self, stream: Stream, source: socket.socket, target: socket.socket) -> None:
        """Carry one direction; its end is the end of both."""
        loop = asyncio.get_running_loop()
        passed = 0
        while data := await loop.sock_recv(source, READ_BYTES):
            if stream == "answers" and passed == 0:
                data = await self._redirected(source, data)
            end = passed + len(data)
            if self.fault is not None and self.fault.stream == stream and passed <= self.fault.at < end:
                fault, self.fault = self.fault, None
                at = fault.at - passed
                await loop.sock_sendall(target, data[:at])
                if fault.kind == "cut":
                    return
                data = await _changed(fault.kind, data[at:])
            await loop.sock_sendall(target, data)
            passed = end
            self.num_bytes[stream] = passed

    async def _redirected(self, source: socket.socket, data: bytes) -> bytes:
        """Put the own data door into the receiver's Hello."""
        loop = asyncio.get_running_loop()
        (size,) = struct.unpack("<I", data[:4])
        while len(data) < 4 + size:
            data += await loop.sock_recv(source, READ_BYTES)
        frame = transfer_pb2.TransferFrame.FromString(data[4 : 4 + size])
        if frame.hello.extra:
            (self._data_port,) = struct.unpack_from("<H", frame.hello.extra)
            frame.hello.extra = struct.pack("<H", self._doors[1].getsockname()[1]) + frame.hello.extra[2:]
        payload = frame.SerializeToString()
        return struct.pack("<I", len(payload)) + payload + data[4 + size :]


async def _changed(kind: Kind, data: bytes) -> bytes:
    match kind:
        case "delay":
            await asyncio.sleep(DELAY_S)
            return data
        case "drop":
            return data[7:]
        case "duplicate":
            return data[:9] + data
        case "corrupt":
            return bytes([data[0] ^ 0x41]) + data[1:]
        case _:
            raise AssertionError(kind)


@asynccontextmanager
async def faulty_wire(address: transfer_pb2.TransferAddress) -> AsyncIterator[FaultyWire]:
    """Put a wire in front of a receiver that is reached over plain TCP."""
    wire = FaultyWire(address)
    address.tcp_port = wire.port
    running = asyncio.create_task(wire.run())
    try:
        yield wire
    finally:
        running.cancel()
        await asyncio.wait([running])
        wire.close()
