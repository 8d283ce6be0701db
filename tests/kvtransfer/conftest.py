"""The same pair of endpoints over each transport: what every transfer test starts from."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from common.config import TransferConfig
from kvtransfer import native
from kvtransfer.codecs import quantising
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore, FakeNetwork
from kvtransfer.fake_device import FakeCommunicators, FakeDeviceStore
from kvtransfer.interface import Endpoint
from kvtransfer.layout import BlockLayout
from tests.gpu.needs import require_gpu
from tests.kvtransfer.cuda.store import CudaStore

Store = FakeBlockStore | FakeDeviceStore | CudaStore
PLACES: dict[str, tuple[type[Store], type[Store]]] = {
    "": (FakeBlockStore, FakeBlockStore),
    "in a device": (FakeDeviceStore, FakeDeviceStore),
    "from a device": (FakeDeviceStore, FakeBlockStore),
    "to a device": (FakeBlockStore, FakeDeviceStore),
    "in a GPU": (CudaStore, CudaStore),
    "from a GPU": (CudaStore, FakeBlockStore),
    "to a GPU": (FakeBlockStore, CudaStore),
}
"""Where the two pools lie."""
IN_DEVICES = [
    *("tcp in a device", "ucx in a device", "nccl in a device"),
    *(pytest.param(f"{wire} in a GPU", marks=pytest.mark.gpu) for wire in ("tcp", "ucx")),
]


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile before any test begins: a compiler on a busy machine takes longer than a test has."""
    native.library()
    quantising.library()


@dataclass(slots=True)
class Pair:
    """A sender and a receiver, and their pools."""

    sender: Endpoint
    receiver: Endpoint
    source: Store
    target: Store


MakePair = Callable[..., AbstractAsyncContextManager[Pair]]
Run = Callable[[Callable[[Pair], object]], None]


def _stores(transport: str, place: str, num_blocks: int, layout: BlockLayout) -> list[Store]:
    if (transport, place) == ("nccl", "in a device"):
        communicators = FakeCommunicators()
        return [FakeDeviceStore(num_blocks, layout, communicators) for _ in range(2)]
    return [kind(num_blocks, layout) for kind in PLACES[place]]


@asynccontextmanager
async def _pair(
    transport: str, num_blocks: int = 16, layout: BlockLayout = SMALL_LAYOUT, **settings: object
) -> AsyncIterator[Pair]:
    if transport.endswith("GPU"):
        require_gpu()
    transport, _, place = transport.partition(" ")
    source, target = _stores(transport, place, num_blocks, layout)
    for block in range(num_blocks):
        source.fill(block, block + 1)
    sender: Endpoint
    receiver: Endpoint
    if transport == "fake":
        network = FakeNetwork()
        assert isinstance(source, FakeBlockStore)
        assert isinstance(target, FakeBlockStore)
        sender, receiver = network.endpoint("sender", source), network.endpoint("receiver", target)
    else:
        config = TransferConfig.model_validate({"transport": transport, **settings})
        sender = await TransferEndpoint.start("sender", "127.0.0.1", source, config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target, config)
    try:
        yield Pair(sender, receiver, source, target)
    finally:
        await sender.close()
        await receiver.close()
    assert sender.num_active == receiver.num_active == 0


@pytest.fixture(params=["fake", "shm", "ucx", "tcp", "tcp in a device"])
def make_pair(request: pytest.FixtureRequest) -> MakePair:
    """Make pairs over each implementation of the contract."""
    return lambda **settings: _pair(request.param, **settings)


REAL = ["shm", "ucx", "tcp", "tcp in a device", pytest.param("tcp in a GPU", marks=pytest.mark.gpu)]


@pytest.fixture(params=[*REAL, "nccl in a device"])
def make_steady_pair(request: pytest.FixtureRequest) -> MakePair:
    """Make pairs over each real transport, whose pools stay what they are: nccl leads to no other kind."""
    return lambda **settings: _pair(request.param, **settings)


@pytest.fixture(params=REAL)
def make_real_pair(request: pytest.FixtureRequest) -> MakePair:
    """Make pairs over each real transport."""
    return lambda **settings: _pair(request.param, **settings)


@pytest.fixture
def make_shm_pair() -> MakePair:
    """Make pairs over shared memory."""
    return lambda **settings: _pair("shm", **settings)


@pytest.fixture(params=["fake", "shm", "ucx", "tcp", *IN_DEVICES])
def with_pair(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function with a pair, over each implementation, under a limit of time."""

    def run(test: Callable[[Pair], object]) -> None:
        async def main() -> None:
            async with asyncio.timeout(20), _pair(request.param) as pair:
                outcome = test(pair)
                assert asyncio.iscoroutine(outcome)
                await outcome

        asyncio.run(main())

    return run


MIXED = ["tcp from a device", "tcp to a device"]


@pytest.fixture(params=[*MIXED, *(pytest.param(f"tcp {way} a GPU", marks=pytest.mark.gpu) for way in ("from", "to"))])
def make_mixed_pair(request: pytest.FixtureRequest) -> MakePair:
    """Make pairs of which one pool lies in a device."""
    return lambda **settings: _pair(request.param, **settings)
