"""Others' means: NIXL, Mooncake and gloo. Loaded by name, since nothing else here may depend on them."""

import asyncio
import base64
import importlib
import threading
from typing import Any

import numpy as np

from kvtransfer.bench.contender import Side, Unavailable

MOONCAKE_BATCH = 256
"""More chunks in one call are refused by its TCP lanes."""


def load(name: str, hint: str) -> Any:
    """Import a peer's module.

    Raises:
        Unavailable: it is not installed, or does not load.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise Unavailable(f"{hint} ({error})") from error


def chunks(side: Side, by_layer: bool) -> list[list[tuple[int, int]]]:
    """Return (offset, bytes) of the own blocks: one list, or one for each layer."""
    layout = side.work.layout
    size = layout.layer_bytes if by_layer else layout.block_bytes
    begins = side.work.offsets(side.blocks)
    return [[(begin + at, size) for begin in begins] for at in range(0, layout.block_bytes, size)]


class Nixl:
    """Implements `Contender`: descriptors prepared once, then a one-sided read. The option is "default" or "tcp"."""

    is_shared = False

    def __init__(self, side: Side, option: str) -> None:  # noqa: ARG002  (the environment says it to UCX)
        self._side = side
        self._agent: Any
        self._transfers: dict[bool, list[Any]] = {}

    async def connect(self) -> None:
        """Exchange metadata and prepare both forms of the transfer."""
        api = load("nixl._api", "run tools/transfer_peers.sh")
        side, link = self._side, self._side.link
        self._agent = api.nixl_agent("A" if side.is_sender else "B", api.nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(side.pool.address, side.pool.bytes.nbytes, 0, "")], "DRAM")
        link.send([base64.b64encode(self._agent.get_agent_metadata()).decode(), side.pool.address])
        metadata, address = await link.receive()
        peer = self._agent.add_remote_agent(base64.b64decode(metadata))
        if not side.is_sender:
            other = Side(True, side.pool, link)
            for by_layer in (False, True):
                pairs = zip(chunks(side, by_layer), chunks(other, by_layer), strict=True)
                self._transfers[by_layer] = [self._prepare(peer, address, mine, theirs) for mine, theirs in pairs]

    async def serve(self, order: Any) -> None:  # noqa: ARG002
        """Make progress until the reader says that it is done: over TCP its reads are served by this process."""
        finished = threading.Event()

        def progress() -> None:
            while not finished.is_set():
                self._agent.get_new_notifs()
                finished.wait(0.0002)

        serving = asyncio.get_running_loop().run_in_executor(None, progress)
        await self._side.link.receive()
        finished.set()
        await serving

    async def fetch(self, by_layer: bool) -> None:
        """Read all blocks."""
        self._side.link.send("go")
        for transfer in self._transfers[by_layer]:
            state = self._agent.transfer(transfer)
            while state != "DONE":
                if state == "ERR":
                    raise RuntimeError("NIXL reports an error")
                state = self._agent.check_xfer_state(transfer)
        self._side.link.send("done")

    async def close(self) -> None:
        """Left to the end of the process."""

    def _prepare(self, peer: Any, address: int, mine: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> Any:
        local = [(self._side.pool.address + begin, size, 0) for begin, size in mine]
        remote = [(address + begin, size, 0) for begin, size in theirs]
        index = np.arange(len(local), dtype=np.int32)
        ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        other = self._agent.prep_xfer_dlist(peer.decode() if isinstance(peer, bytes) else peer, remote, "DRAM")
        return self._agent.make_prepped_xfer("READ", ours, index, other, index, b"")


class Mooncake:
    """Implements `Contender`: its transfer engine over TCP, one batched read."""

    is_shared = False

    def __init__(self, side: Side, option: str) -> None:  # noqa: ARG002
        self._side = side
        self._engine: Any
        self._session = ""
        self._address = 0

    async def connect(self) -> None:
        """Start the engine and exchange addresses."""
        module = load("mooncake.engine", "run tools/transfer_peers.sh")
        side = self._side
        self._engine = module.TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise Unavailable("its transfer engine does not start")
        if self._engine.register_memory(side.pool.address, side.pool.bytes.nbytes) != 0:
            raise Unavailable("it cannot register the pool")
        side.link.send([f"127.0.0.1:{self._engine.get_rpc_port()}", side.pool.address])
        self._session, self._address = await side.link.receive()

    async def serve(self, order: Any) -> None:
        """Nothing to do: it has threads of its own."""

    async def fetch(self, by_layer: bool) -> None:
        """Read all blocks, in as many batches as it needs."""
        other = Side(True, self._side.pool, self._side.link)
        for mine, theirs in zip(chunks(self._side, by_layer), chunks(other, by_layer), strict=True):
            for at in range(0, len(mine), MOONCAKE_BATCH):
                failed = self._engine.batch_transfer_sync_read(
                    self._session,
                    [self._side.pool.address + begin for begin, _ in mine[at : at + MOONCAKE_BATCH]],
                    [self._address + begin for begin, _ in theirs[at : at + MOONCAKE_BATCH]],
                    [size for _, size in mine[at : at + MOONCAKE_BATCH]],
                )
                if failed:
                    raise RuntimeError(f"Mooncake reports {failed}")

    async def close(self) -> None:
        """Left to the end of the process."""


class Gloo:
    """Implements `Contender`: send and recv of torch.distributed; layers are gathered and scattered."""

    is_shared = False

    def __init__(self, side: Side, option: str) -> None:
        self._side = side
        self._store = option
        self._dist: Any
        self._torch: Any

    async def connect(self) -> None:
        """Meet by a file."""
        self._torch, self._dist = load("torch", "torch"), load("torch.distributed", "torch")
        self._torch.set_num_threads(1)
        rank = 0 if self._side.is_sender else 1
        store = self._dist.FileStore(self._store, 2)
        await asyncio.to_thread(self._dist.init_process_group, "gloo", store=store, rank=rank, world_size=2)

    async def serve(self, order: Any) -> None:
        """Send all blocks."""
        blocks = self._side.pool.blocks
        if order:
            for part in self._columns():
                self._dist.send(self._torch.from_numpy(np.ascontiguousarray(blocks[self._side.blocks, part])), 1)
        else:
            for block in self._side.blocks:
                self._dist.send(self._torch.from_numpy(blocks[block]), 1)

    async def fetch(self, by_layer: bool) -> None:
        """Receive them."""
        self._side.link.send(by_layer)
        blocks, layout = self._side.pool.blocks, self._side.work.layout
        if by_layer:
            staging = self._torch.empty((len(self._side.blocks), layout.layer_bytes), dtype=self._torch.uint8)
            for part in self._columns():
                self._dist.recv(staging, 0)
                blocks[self._side.blocks, part] = staging.numpy()
        else:
            for block in self._side.blocks:
                self._dist.recv(self._torch.from_numpy(blocks[block]), 0)

    async def close(self) -> None:
        """Left to the end of the process."""

    def _columns(self) -> list[slice]:
        layout = self._side.work.layout
        return [slice(at, at + layout.layer_bytes) for at in range(0, layout.block_bytes, layout.layer_bytes)]
