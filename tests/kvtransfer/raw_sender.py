"""A sender of bare frames, right or wrong, for tests of what a receiver believes."""

import asyncio
import hashlib
import socket
import struct

import xxhash

from baton_pb.v1 import transfer_pb2
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.landing import BlockLanding
from kvtransfer.wire import PROTOCOL

Frame = transfer_pb2.TransferFrame


class RawSender:
    """A sender that says what the test wants."""

    def __init__(self, sock: socket.socket, store: FakeBlockStore) -> None:
        self.sock = sock
        self.store = store

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send(self, frame: Frame) -> None:
        payload = frame.SerializeToString()
        await self.write(struct.pack("<I", len(payload)) + payload)

    async def receive(self) -> Frame | None:
        """Return the next frame that is no ping; None at the end of the connection."""
        loop = asyncio.get_running_loop()
        while True:
            header = await self._exactly(4)
            if header is None:
                return None
            payload = await self._exactly(struct.unpack("<I", header)[0])
            assert payload is not None
            frame = Frame.FromString(payload)
            if frame.WhichOneof("frame") != "ping":
                return frame
            await asyncio.sleep(0)
            assert loop.is_running()

    async def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            try:
                part = await asyncio.get_running_loop().sock_recv(self.sock, size - len(data))
            except ConnectionResetError:
                return None
            if not part:
                return None
            data += part
        return data

    async def hello(self, **changes: object) -> None:
        hello = transfer_pb2.Hello(
            protocol=PROTOCOL, worker_id="raw", generation=1, layout=SMALL_LAYOUT.to_pb(), num_blocks=16
        )
        for name, value in changes.items():
            setattr(hello, name, value)
        payload = Frame(hello=hello).SerializeToString()
        fd = self.store.memfd
        assert fd is not None
        socket.send_fds(self.sock, [struct.pack("<I", len(payload)) + payload], [fd])

    async def open(self, landing: BlockLanding, codec: str = "") -> None:
        ticket = landing.ticket
        opening = transfer_pb2.Open(transfer_id=ticket.transfer_id, secret=ticket.secret, codec=codec)
        await self.send(Frame(open=opening))
        answer = await self.receive()
        assert answer is not None
        assert answer.WhichOneof("frame") == "open"

    def ready(self, landing: BlockLanding, **changes: object) -> Frame:
        """Return a right Ready for landing block 0, but for `changes`."""
        ticket = landing.ticket
        base = hashlib.blake2b(ticket.transfer_id, digest_size=8, key=ticket.secret).digest()
        ready = transfer_pb2.Ready(
            transfer_id=ticket.transfer_id,
            seq=0,
            first=0,
            layer_begin=0,
            layer_end=SMALL_LAYOUT.num_layers,
            source_block_ids=[3],
            num_bytes=SMALL_LAYOUT.block_bytes,
            checksum=xxhash.xxh3_64_intdigest(self.store.block(3)),
            tag=int.from_bytes(base, "little"),
        )
        for name, value in changes.items():
            if name == "source_block_ids":
                assert isinstance(value, list)
                ready.source_block_ids[:] = value
            else:
                setattr(ready, name, value)
        return Frame(ready=ready)
