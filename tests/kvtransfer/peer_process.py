"""A process with a transfer endpoint that pushes, grants and waits as it is told, line by line."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]

PEER = """
import asyncio, sys
from baton_pb.v1 import transfer_pb2
from common.config import TransferConfig
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore

async def main():
    layout = SMALL_LAYOUT._replace(num_layers=16, block_tokens=64, head_dim=128)
    store = FakeBlockStore(24, layout)
    transport, _, codec = sys.argv[1].partition(" ")
    settings = {"transport": transport, "codec": codec or "raw", "sealed": bool(codec), "connect_timeout_s": 60.0}
    config = TransferConfig.model_validate(settings)
    endpoint = await TransferEndpoint.start("peer", sys.argv[2], store, config)
    print("ready", flush=True)
    while True:
        line = await asyncio.to_thread(sys.stdin.readline)
        command, _, argument = line.strip().partition(" ")
        if command == "grant":
            landing = endpoint.grant(list(range(int(argument))), 0)
            print(landing.ticket.SerializeToString().hex(), flush=True)
        elif command == "landed":
            await landing.landed()
            print(all(set(store.block(b)) == {b + 1} for b in range(int(argument))), flush=True)
        elif command == "push":
            ticket = transfer_pb2.Ticket.FromString(bytes.fromhex(argument))
            for block in range(24):
                store.write(block, bytes([block + 1]) * layout.block_bytes)
            push = await endpoint.open_push(ticket)
            push.announce(0, list(range(len(ticket.block_ids))))
            print("announced", flush=True)
        elif command == "finish":
            print((await push.finish()).num_bytes, flush=True)
        else:
            await endpoint.close()
            return

asyncio.run(main())
"""


class Peer:
    """A child process that does what it is told by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        await self.process.stdin.drain()

    async def ask(self, line: str) -> str:
        await self.tell(line)
        return await self.hear()

    async def hear(self) -> str:
        assert self.process.stdout is not None
        while True:
            line = (await self.process.stdout.readline()).decode().strip()
            if " UCX " not in line:  # its complaints about the environment go to standard output
                return line


@asynccontextmanager
async def peer(transport: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> AsyncIterator[Peer]:
    """Start a process that has an endpoint on `host`; its command begins with `prefix`."""
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-c",
        PEER,
        transport,
        host,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 20,
    )
    child = Peer(process)
    try:
        assert await child.hear() == "ready"
        yield child
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
