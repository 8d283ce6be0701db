"""On a GPU the kernel copies what numpy copies, and pinned memory and blocks come and go whole."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtransfer.activity import Stop
from kvtransfer.device import DeviceMemory
from kvtransfer.fake_device import FakeDeviceStore
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import block_bytes_of
from kvtransfer.pieces import Piece, Run, Runs, runs_of
from tests.gpu.needs import require_gpu
from tests.kvtransfer.cuda.store import CudaStore

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 64


@pytest.fixture(autouse=True)
def _gpu() -> None:
    require_gpu()


def stores(layout: BlockLayout) -> tuple[CudaStore, FakeDeviceStore]:
    """Return two pools of the same content."""
    pair = CudaStore(NUM_BLOCKS, layout), FakeDeviceStore(NUM_BLOCKS, layout)
    for block in range(NUM_BLOCKS):
        for store in pair:
            store.fill(block, block)
    return pair


def gathered(store: CudaStore | FakeDeviceStore, runs: Runs) -> bytes:
    assert store.device is not None
    memory = DeviceMemory(store.device)
    staging = memory.staging(runs.num_bytes)
    memory.gather(runs, staging, Stop())
    return bytes(staging)


@pytest.mark.parametrize("layers", [range(6), range(1), range(2, 5)])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), [("bfloat16", 8, 128), ("float32", 3, 64), ("int8", 1, 65), ("float16", 1, 1)]
)
def test_pieces_are_gathered_and_scattered_as_numpy_does(dtype: str, heads: int, dim: int, layers: range) -> None:
    layout = BlockLayout("m", dtype, 16, 6, heads, dim)
    gpu, reference = stores(layout)
    rng = random.Random(dim)
    for _ in range(20):
        count = rng.randint(1, 30)
        sources, targets = rng.choices(range(NUM_BLOCKS), k=count), rng.sample(range(NUM_BLOCKS), count)
        runs = runs_of(Piece(0, tuple(sources), layers), targets, layout)

        messages = [gathered(store, runs) for store in (gpu, reference)]
        assert messages[0] == messages[1]
        for store in (gpu, reference):
            assert store.device is not None
            DeviceMemory(store.device).scatter(memoryview(messages[0]), runs, Stop())

    assert all(gpu.block(block) == reference.block(block) for block in range(NUM_BLOCKS))


def test_one_long_run_and_very_many_short_ones() -> None:
    gpu, reference = stores(BlockLayout("m", "float32", 16, 16, 8, 64))
    whole = NUM_BLOCKS * gpu.layout.block_bytes
    short = [Run(at * 48, 0, 16) for at in range(70_000)]

    for runs in (Runs.of([Run(0, 0, whole)]), Runs.of(short)):
        assert gathered(gpu, runs) == gathered(reference, runs)


def test_threads_copy_at_the_same_time() -> None:
    gpu, reference = stores(BlockLayout("m", "bfloat16", 16, 6, 8, 128))
    size = gpu.layout.block_bytes

    def one(seed: int) -> bool:
        blocks = random.Random(seed).choices(range(NUM_BLOCKS), k=20)
        runs = Runs.of([Run(block * size, 0, size) for block in blocks])
        return gathered(gpu, runs) == b"".join(reference.block(block) for block in blocks)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(100)))


def test_a_block_is_read_and_overwritten_where_it_lies() -> None:
    gpu, reference = stores(BlockLayout("m", "bfloat16", 16, 6, 8, 128))

    with block_bytes_of(gpu, 2) as source, block_bytes_of(gpu, 3, is_written=True) as target:
        np.asarray(target)[:] = np.asarray(source)

    assert gpu.block(3) == gpu.block(2) == reference.block(2)
    assert gpu.block(4) == reference.block(4)
