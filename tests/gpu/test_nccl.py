"""Between two GPUs NCCL brings blocks across, by `auto` and after a transfer that was given up."""

import asyncio

import pytest
import torch

from common.config import TransferConfig
from common.errors import TransferError
from kvtransfer.endpoint import TransferEndpoint
from tests.gpu.needs import require_gpu
from tests.kvtransfer.cuda.store import CudaStore

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    require_gpu()
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")


def test_blocks_go_from_one_gpu_to_another() -> None:
    async def test() -> None:
        source, target = CudaStore(index=0), CudaStore(index=1)
        for block in range(source.num_blocks):
            source.fill(block, block + 1)
        sender = await TransferEndpoint.start("sender", "127.0.0.1", source, TransferConfig(connect_timeout_s=60.0))
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", target, TransferConfig())
        try:
            async with asyncio.timeout(120):
                for turn in range(20):
                    landing = receiver.grant([3, 4, 9], 0)
                    push = await sender.open_push(landing.ticket)
                    assert push.transport == "nccl"
                    push.announce(0, [7, 8, turn % 16], range(1))
                    if turn % 5 == 4:
                        await landing.abort("changed its mind")
                        with pytest.raises(TransferError):
                            await push.finish()
                        await push.abort("so be it")
                        continue
                    push.announce(0, [7, 8, turn % 16], range(1, 3))
                    await asyncio.gather(push.finish(), landing.landed())
                    assert [target.block(b) for b in (3, 4, 9)] == [source.block(b) for b in (7, 8, turn % 16)]
        finally:
            await sender.close()
            await receiver.close()

    asyncio.run(test())
