"""What the pool evicts comes back byte for byte, from memory or disk, after a restart too, within its bounds."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from engine.block_pool import BlockPool
from engine.cache_log import CacheTier
from engine.disk_tier import DiskTier
from engine.tiers import BlockTiers
from kvtransfer.codecs.base import Codec, Slabs
from kvtransfer.codecs.raw import RawCodec
from kvtransfer.codecs.registry import CODECS
from kvtransfer.device import DeviceBuffer
from kvtransfer.fake import FakeBlockStore
from kvtransfer.fake_device import FakeDevice, FakeDeviceStore
from kvtransfer.pieces import Runs

Store = FakeBlockStore | FakeDeviceStore
LIMIT_S = 10.0
NUM_BLOCKS = 8


def name(seed: int) -> bytes:
    return seed.to_bytes(16, "big")


class LossyCodec(RawCodec):
    """What it encodes cannot be decoded."""

    def encode(self, raw: memoryview, slabs: Slabs) -> memoryview:
        return super().encode(raw, slabs)[1:]


class Bench:
    """A pool over a store, and its tiers."""

    def __init__(self, host_blocks: int, disk: DiskTier | None, codec: Codec, kind: type[Store]) -> None:
        self.store = kind(NUM_BLOCKS)
        self.pool = BlockPool(NUM_BLOCKS)
        block_bytes = self.store.layout.block_bytes
        self.tiers = BlockTiers(self.store, self.pool.log, codec, host_blocks * block_bytes, disk)
        self.pool.on_evict = self.tiers.evicted
        self.known: dict[CacheTier, set[bytes]] = {tier: set() for tier in CacheTier}

    def keep(self, *seeds: int) -> None:
        """Leave blocks with these contents in the prefix cache."""
        for seed in seeds:
            (block_id,) = self.pool.allocate(1)
            self.store.fill(block_id, seed)
            self.pool.seal(block_id, name(seed))
            self.pool.release([block_id])

    def evict_all(self) -> None:
        blocks = self.pool.allocate(NUM_BLOCKS)
        for block_id in blocks:
            self.store.write(block_id, bytes(self.store.layout.block_bytes))
        self.pool.release(blocks)

    async def settle(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not self.tiers.is_settled:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.005)

    async def restore(self, *seeds: int) -> int:
        """Bring blocks back and compare them."""
        blocks = self.pool.allocate(len(seeds))
        count = await self.tiers.restore([name(seed) for seed in seeds], blocks)
        (expected,) = self.pool.allocate(1)
        for block_id, seed in zip(blocks[:count], seeds, strict=False):
            self.store.fill(expected, seed)
            assert self.store.block(block_id) == self.store.block(expected)
        self.pool.release([*blocks, expected])
        return count

    def follow(self) -> None:
        """Take the events; they must say what the tiers hold."""
        for change in self.pool.drain_events():
            known = self.known[change.tier]
            assert all((block_hash in known) != change.stored for block_hash in change.hashes)
            self.known[change.tier] = known | set(change.hashes) if change.stored else known - set(change.hashes)
        for tier in (CacheTier.HOST, CacheTier.DISK):
            assert self.known[tier] == set(self.tiers.hashes(tier))


@asynccontextmanager
async def running(
    host_blocks: int, disk: DiskTier | None = None, codec: Codec = CODECS["raw"], kind: type[Store] = FakeBlockStore
) -> AsyncIterator[Bench]:
    bench = Bench(host_blocks, disk, codec, kind)
    moving = asyncio.create_task(bench.tiers.run())
    try:
        yield bench
    finally:
        moving.cancel()
        await asyncio.wait([moving])


def disk_of(folder: Path, num_blocks: int, key: str = "key") -> DiskTier:
    return DiskTier(folder, key, num_blocks * (FakeBlockStore(1).layout.block_bytes + 24))


def run(scenario: Callable[[], object]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]  # a coroutine function without arguments


@pytest.mark.parametrize("kind", [FakeBlockStore, FakeDeviceStore])
def test_evicted_blocks_come_back_from_the_host_before_and_after_they_are_encoded(kind: type[Store]) -> None:
    async def scenario() -> None:
        async with running(host_blocks=4, kind=kind) as bench:
            bench.keep(1, 2, 3)
            bench.evict_all()
            assert await bench.restore(1, 2, 3) == 3
            await bench.settle()

            assert bench.tiers.peek([name(1), name(2), name(9), name(3)]) == 2
            assert await bench.restore(1, 2, 3) == 3
            bench.follow()

    run(scenario)


class WatchedDevice(FakeDevice):
    """Remembers which threads copied within the device, and which out of it."""

    gathers: list[int]
    downloads: list[int]

    def gather(self, runs: Runs, target: DeviceBuffer) -> None:
        self.gathers.append(threading.get_ident())
        super().gather(runs, target)

    def download(self, source: DeviceBuffer, target: memoryview) -> None:
        self.downloads.append(threading.get_ident())
        super().download(source, target)


class WatchedStore(FakeDeviceStore):
    """A pool in a watched device."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.watched = WatchedDevice(self._pool.reshape(-1))
        self.watched.gathers, self.watched.downloads = [], []
        self.device = self.watched


def test_the_loop_waits_for_one_copy_within_a_device_and_for_no_download() -> None:
    async def scenario() -> None:
        async with running(host_blocks=8, kind=WatchedStore) as bench:
            assert isinstance(bench.store, WatchedStore)
            watched = bench.store.watched
            bench.keep(1, 2, 3)
            bench.evict_all()
            assert watched.gathers == [threading.get_ident()]
            assert watched.downloads == []
            await bench.settle()

            assert len(watched.downloads) == 3
            assert threading.get_ident() not in watched.downloads
            assert await bench.restore(1, 2, 3) == 3

    run(scenario)


def test_the_host_keeps_the_most_recently_used_within_its_bound() -> None:
    async def scenario() -> None:
        async with running(host_blocks=2) as bench:
            bench.keep(1, 2)
            bench.evict_all()
            await bench.settle()
            assert await bench.restore(1) == 1
            bench.keep(3)
            bench.evict_all()
            await bench.settle()

            assert set(bench.tiers.hashes(CacheTier.HOST)) == {name(1), name(3)}
            assert await bench.restore(2) == 0
            bench.follow()

    run(scenario)


def test_what_leaves_the_host_is_on_disk_within_its_bound_and_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(host_blocks=1, disk=disk_of(tmp_path, 3)) as bench:
            bench.keep(1, 2, 3, 4, 5)
            bench.evict_all()
            await bench.settle()
            assert len(bench.tiers.hashes(CacheTier.HOST)) == 1
            on_disk = set(bench.tiers.hashes(CacheTier.DISK))
            assert len(on_disk) == 3
            assert sum(file.stat().st_size for file in (tmp_path / "key").iterdir()) <= disk_of(tmp_path, 3).bytes_max
            seeds = [int.from_bytes(block_hash, "big") for block_hash in on_disk]
            assert await bench.restore(*seeds) == 3
            bench.follow()
        async with running(host_blocks=1, disk=disk_of(tmp_path, 3)) as bench:
            assert set(bench.tiers.hashes(CacheTier.DISK)) == on_disk
            assert await bench.restore(*seeds) == 3
        async with running(host_blocks=1, disk=disk_of(tmp_path, 2)) as bench:
            assert len(bench.tiers.hashes(CacheTier.DISK)) == 2

    run(scenario)


def test_files_of_another_model_are_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(host_blocks=0, disk=disk_of(tmp_path, 3)) as bench:
            bench.keep(1)
            bench.evict_all()
            await bench.settle()
        async with running(host_blocks=0, disk=disk_of(tmp_path, 3, key="other")) as bench:
            assert bench.tiers.hashes(CacheTier.DISK) == []

    run(scenario)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_a_file_that_is_not_what_it_was_is_forgotten(tmp_path: Path, harm: str) -> None:
    async def scenario() -> None:
        async with running(host_blocks=0, disk=disk_of(tmp_path, 8)) as bench:
            bench.keep(1, 2, 3)
            bench.evict_all()
            await bench.settle()
            path = tmp_path / "key" / name(2).hex()
            data = bytearray(path.read_bytes())
            match harm:
                case "flip":
                    data[100] ^= 1
                    path.write_bytes(data)
                case "cut":
                    path.write_bytes(data[:-1])
                case "empty":
                    path.write_bytes(b"")
                case "gone":
                    path.unlink()

            assert await bench.restore(1, 2, 3) == 1
            assert bench.tiers.peek([name(2)]) == 0
            assert await bench.restore(3) == 1
            bench.follow()

    run(scenario)


def test_a_tier_that_is_slower_than_computing_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(host_blocks=1, disk=disk_of(tmp_path, 8)) as bench:
            bench.keep(1, 2)
            bench.evict_all()
            await bench.settle()
            (on_disk,), (in_memory,) = (bench.tiers.hashes(tier) for tier in (CacheTier.DISK, CacheTier.HOST))
            assert bench.tiers.peek([on_disk], block_s=1e-9) == 1  # it was not tried yet
            assert await bench.restore(int.from_bytes(on_disk, "big")) == 1

            assert bench.tiers.peek([on_disk], block_s=1e-9) == 0
            assert bench.tiers.peek([in_memory, on_disk], block_s=1e-9) == 1
            assert bench.tiers.peek([in_memory, on_disk], block_s=60.0) == 2
            assert await bench.restore(int.from_bytes(in_memory, "big")) == 1
            assert bench.tiers.peek([in_memory, on_disk], block_s=1e-9) == 0
            assert bench.tiers.peek([in_memory, on_disk], block_s=60.0) == 2

    run(scenario)


def test_a_disk_that_takes_nothing_costs_blocks_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(host_blocks=1, disk=disk_of(tmp_path, 8)) as bench:
            (tmp_path / "key").rmdir()
            bench.keep(1, 2, 3)
            bench.evict_all()
            await bench.settle()

            assert bench.tiers.hashes(CacheTier.DISK) == []
            assert len(bench.tiers.hashes(CacheTier.HOST)) == 1
            assert bench.tiers.counters["tier_disk_errors_total"] == 2
            bench.follow()

    run(scenario)


def test_int8_takes_less_space_and_brings_nearly_the_same_values() -> None:
    async def scenario() -> None:
        async with running(host_blocks=4, codec=CODECS["int8"]) as bench:
            (block_id,) = bench.pool.allocate(1)
            values = np.random.default_rng(0).standard_normal(bench.store.layout.block_bytes // 4, np.float32)
            bench.store.write(block_id, values.tobytes())
            bench.pool.seal(block_id, name(1))
            bench.pool.release([block_id])
            bench.evict_all()
            await bench.settle()
            (restored,) = bench.pool.allocate(1)
            assert await bench.tiers.restore([name(1)], [restored]) == 1

            again = np.frombuffer(bench.store.block(restored), np.float32)
            assert not np.array_equal(again, values)
            np.testing.assert_allclose(again, values, atol=np.abs(values).max() / 127)
            bench.pool.release([restored])

    run(scenario)


def test_values_that_the_codec_refuses_are_dropped() -> None:
    async def scenario() -> None:
        async with running(host_blocks=4, codec=CODECS["int8"]) as bench:
            (block_id,) = bench.pool.allocate(1)
            bench.store.write(block_id, np.full(bench.store.layout.block_bytes // 4, np.nan, np.float32).tobytes())
            bench.pool.seal(block_id, name(1))
            bench.pool.release([block_id])
            bench.keep(2)
            bench.evict_all()
            await bench.settle()

            assert bench.tiers.peek([name(1)]) == 0
            assert bench.tiers.counters["tier_blocks_dropped_total"] >= 1
            bench.follow()

    run(scenario)


def test_a_block_in_memory_that_cannot_be_decoded_is_forgotten() -> None:
    async def scenario() -> None:
        async with running(host_blocks=4, codec=LossyCodec()) as bench:
            bench.keep(1, 2)
            bench.evict_all()
            await bench.settle()

            assert await bench.restore(1, 2) == 0
            await bench.settle()

            assert bench.tiers.peek([name(1)]) == 0
            assert bench.tiers.counters["tier_blocks_corrupt_total"] == 1
            assert name(2) in bench.tiers.hashes(CacheTier.HOST)
            bench.follow()
            bench.keep(1)
            bench.evict_all()
            assert await bench.restore(1) == 1  # copied anew, and not encoded yet

    run(scenario)
