"""Below the pool: what it evicts goes to a bounded part of the host's memory, from there to disk, and can come back.

Evicted blocks are copied on the worker's loop, since their memory is given away at once. Those of a pool in a GPU are
only gathered on it, all in one launch, into memory beside the pool; another thread downloads them from there.
"""

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from common.config import EngineConfig
from common.errors import TransferError
from engine.cache_log import CacheLog, CacheTier
from engine.disk_tier import DiskTier
from kvtransfer.codecs.base import Codec, Slabs
from kvtransfer.codecs.registry import CODECS, codec_for
from kvtransfer.device import Device, DeviceBuffer
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import block_bytes_of
from kvtransfer.pieces import Run, Runs
from kvtransfer.store import BlockStore

STAGED_BYTES_MAX = 64 << 20
"""Evicted blocks that are copied (within a GPU, if they come from one) but not encoded yet; beyond it evicted blocks
are lost, as without tiers."""
COST_MEMORY_S = 30.0
"""How long a tier that was slower than computing is left alone."""
BATCH_BLOCKS = 32
"""Blocks that are encoded, or written, in one go."""


class _Cost(NamedTuple):
    """Seconds to restore a block, and when that was measured."""

    block_s: float
    measured_s: float


class _Parked(NamedTuple):
    """A block that has left the pool of a device and lies beside it."""

    device: Device
    buffer: DeviceBuffer

    def download(self) -> memoryview:
        """Return its bytes; blocks."""
        target = self.device.pinned(self.buffer.num_bytes)
        self.device.download(self.buffer, target)
        return target


class _Source(NamedTuple):
    """What a block is restored from."""

    block_hash: bytes
    data: bytes | _Parked | None
    """What this process has of it; None: a file has it, if anything."""
    is_raw: bool
    """Whether `data` is not encoded yet."""


class BlockTiers:
    """The tiers of one worker.

        pool ──evicted, copied──► staged ──encoded──► host ──least recently used──► disk ──► gone
          ▲                          │                  │                             │
          └──────── restore ─────────┴──────────────────┴─────────────────────────────┘

    A block that was restored stays where it was, so that evicting it again costs nothing. Owned by the worker's loop;
    encoding, decoding and files are left to other threads.
    """

    def __init__(self, store: BlockStore, log: CacheLog, codec: Codec, host_bytes: int, disk: DiskTier | None) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._log = log
        self._codec = codec
        self._slabs = Slabs.of(store.layout, 1, store.layout.num_layers)
        self._host_bytes_max = host_bytes
        self._disk = disk
        self._staged: OrderedDict[bytes, bytes | _Parked] = OrderedDict()
        self._host: OrderedDict[bytes, bytes] = OrderedDict()
        self._host_bytes = 0
        self._costs: dict[CacheTier, _Cost] = {}
        """Of restoring a block, as it was the last time."""
        self._wake = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits to be moved."""
        return not self._staged and self._host_bytes <= self._host_bytes_max

    @property
    def is_exact(self) -> bool:
        """Whether blocks come back as they were."""
        return self._codec.is_lossless

    def evicted(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Copy blocks that the pool is about to give away; those that are here already are only noted as used."""
        room = STAGED_BYTES_MAX // self._store.layout.block_bytes - len(self._staged)
        leaving: list[tuple[int, bytes]] = []
        for block_id, block_hash in blocks:
            if block_hash in self._host:
                self._host.move_to_end(block_hash)
            elif self._disk is not None and block_hash in self._disk:
                self._disk.touch(block_hash)
            elif len(leaving) == room:
                self.counters["tier_blocks_dropped_total"] += 1
            else:
                leaving.append((block_id, block_hash))
        if leaving:
            self._stage(leaving)
            self._wake.set()

    def peek(self, hashes: Sequence[bytes], block_s: float = math.inf) -> int:
        """Return how many of the first `hashes` are here, and restored sooner than in `block_s` each."""
        oldest = time.monotonic() - COST_MEMORY_S
        slow = {tier for tier, cost in self._costs.items() if cost.measured_s >= oldest and cost.block_s >= block_s}
        for count, block_hash in enumerate(hashes):
            tier = self._where(block_hash)
            if tier is None or tier in slow:
                return count
        return len(hashes)

    async def restore(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Write blocks into blocks of the pool that the caller holds; return how many of the first ones came.

        A block that cannot be read any more ends it. When cancelled, this returns only after the last byte was written.
        """
        sources = [self._source(block_hash) for block_hash in hashes]
        began = time.monotonic()
        reading = asyncio.ensure_future(asyncio.to_thread(self._read, sources, block_ids))
        try:
            count = await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait([reading])  # until then the blocks are written to
            raise
        tiers = {CacheTier.DISK if source.data is None else CacheTier.HOST for source in sources[:count]}
        if len(tiers) == 1:  # else nobody knows which of them took how long
            now = time.monotonic()
            self._costs[tiers.pop()] = _Cost((now - began) / count, now)
        for block_hash in hashes[:count]:
            self._use(block_hash)
        if count < len(hashes):
            self._lose(sources[count])
        self.counters["tier_blocks_restored_total"] += count
        return count

    def hashes(self, tier: CacheTier) -> list[bytes]:
        """Return what a tier holds."""
        if tier is CacheTier.HOST:
            return list(self._host)
        return [] if self._disk is None else self._disk.hashes()

    async def run(self) -> None:
        """Move blocks on, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not self.is_settled:
                await self._encode()
                await self._shrink()

    def _stage(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        device, size = self._store.device, self._store.layout.block_bytes
        if device is None:
            for block_id, block_hash in blocks:
                with block_bytes_of(self._store, block_id) as block:
                    self._staged[block_hash] = bytes(block)
            return
        buffer = device.buffer(len(blocks) * size)
        device.gather(Runs.of([Run(block_id * size, i * size, size) for i, (block_id, _) in enumerate(blocks)]), buffer)
        for i, (_, block_hash) in enumerate(blocks):
            self._staged[block_hash] = _Parked(device, buffer.part(i * size, size))

    async def _encode(self) -> None:
        batch = [(key, self._staged[key]) for key in list(self._staged)[:BATCH_BLOCKS]]
        encoded = await asyncio.to_thread(lambda: [self._encoded(raw) for _, raw in batch])
        kept = []
        for (block_hash, _), data in zip(batch, encoded, strict=True):
            del self._staged[block_hash]
            if data is not None:
                self._host[block_hash] = data
                self._host_bytes += len(data)
                kept.append(block_hash)
        self.counters["tier_blocks_dropped_total"] += len(batch) - len(kept)
        if kept:
            self._log.note(True, kept, CacheTier.HOST)

    def _encoded(self, staged: bytes | _Parked) -> bytes | None:
        """Return a block encoded; None if its values cannot be. On another thread."""
        raw = staged.download() if isinstance(staged, _Parked) else memoryview(staged)
        try:
            return bytes(self._codec.encode(raw, self._slabs))
        except TransferError:
            return None

    async def _shrink(self) -> None:
        leaving: list[tuple[bytes, bytes]] = []
        left = self._host_bytes
        for block_hash, data in self._host.items():
            if left <= self._host_bytes_max or len(leaving) == BATCH_BLOCKS:
                break
            left -= len(data)
            leaving.append((block_hash, data))
        if leaving and self._disk is not None:
            await self._write(self._disk, leaving)
        # One that could not be restored meanwhile is gone already.
        gone = [block_hash for block_hash, _ in leaving if block_hash in self._host]
        for block_hash in gone:
            self._host_bytes -= len(self._host.pop(block_hash))
        if gone:
            self._log.note(False, gone, CacheTier.HOST)

    async def _write(self, disk: DiskTier, blocks: list[tuple[bytes, bytes]]) -> None:
        new = [(block_hash, data) for block_hash, data in blocks if block_hash not in disk]
        sizes = await asyncio.to_thread(lambda: [disk.write(*block) for block in new])
        written = [(block_hash, size) for (block_hash, _), size in zip(new, sizes, strict=True) if size]
        self.counters["tier_disk_errors_total"] += len(new) - len(written)
        for block_hash, size in written:
            disk.add(block_hash, size)
        surplus = disk.surplus()
        await asyncio.to_thread(disk.remove, surplus)
        if written:
            self._log.note(True, [block_hash for block_hash, _ in written], CacheTier.DISK)
        if surplus:
            self._log.note(False, surplus, CacheTier.DISK)

    def _source(self, block_hash: bytes) -> _Source:
        staged = self._staged.get(block_hash)
        return _Source(block_hash, self._host.get(block_hash) if staged is None else staged, staged is not None)

    def _read(self, sources: Sequence[_Source], block_ids: Sequence[int]) -> int:
        """Fill blocks of the pool; on another thread."""
        for count, (source, block_id) in enumerate(zip(sources, block_ids, strict=True)):
            data = source.data.download() if isinstance(source.data, _Parked) else source.data
            if data is None and self._disk is not None:
                data = self._disk.read(source.block_hash)
            if data is None:
                return count
            try:
                with block_bytes_of(self._store, block_id, is_written=True) as block:
                    if source.is_raw:
                        block[:] = data
                    else:
                        self._codec.decode(memoryview(data), self._slabs, block)
            except TransferError:
                return count
        return len(sources)

    def _where(self, block_hash: bytes) -> CacheTier | None:
        if block_hash in self._staged or block_hash in self._host:
            return CacheTier.HOST
        return CacheTier.DISK if self._disk is not None and block_hash in self._disk else None

    def _use(self, block_hash: bytes) -> None:
        if block_hash in self._host:
            self._host.move_to_end(block_hash)
        elif self._disk is not None and block_hash in self._disk:
            self._disk.touch(block_hash)

    def _lose(self, source: _Source) -> None:
        """Forget a block that could not be read: what is here of it is not what it was."""
        block_hash = source.block_hash
        if source.data is None:
            if self._disk is None or block_hash not in self._disk:
                return
            self._disk.forget(block_hash)
            self._disk.remove([block_hash])
            self._log.note(False, [block_hash], CacheTier.DISK)
        else:
            if self._host.get(block_hash) is not source.data:  # it has gone on meanwhile, or was not encoded yet
                return
            self._host_bytes -= len(self._host.pop(block_hash))
            self._log.note(False, [block_hash], CacheTier.HOST)
        self.counters["tier_blocks_corrupt_total"] += 1


def make_tiers(
    store: BlockStore, log: CacheLog, config: EngineConfig, worker_id: str, model_dir: Path, backend: str
) -> BlockTiers | None:
    """Return the tiers that the config asks for; None: none.

    Raises:
        ConfigError: the disk tier's folder cannot be used.
    """
    if not config.host_tier_mib and not config.disk_tier_mib:
        return None
    codec = CODECS[codec_for(store.layout, config.tier_codec)]
    disk = None
    if config.disk_tier_mib:
        folder = config.disk_tier_dir.expanduser() / worker_id
        key = _key(store.layout, codec.name, config, model_dir, backend)
        disk = DiskTier(folder, key, config.disk_tier_mib << 20)
    return BlockTiers(store, log, codec, config.host_tier_mib << 20, disk)


def _key(layout: BlockLayout, codec: str, config: EngineConfig, model_dir: Path, backend: str) -> str:
    """Name everything that the bytes of a block depend on besides its tokens."""
    files = sorted(model_dir.iterdir()) if model_dir.is_dir() else [model_dir]
    facts = [repr(layout), codec, backend, config.weights, config.activations]
    for path in files:
        if path.suffix in (".safetensors", ".gguf", ".json"):
            status = path.stat()
            facts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return xxhash.xxh3_128_hexdigest("\n".join(facts).encode())
