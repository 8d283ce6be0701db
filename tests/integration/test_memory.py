"""What the demo model is served with unless told otherwise: fast kernels, little memory, one host's weights once."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from baton_pb.v1 import admin_pb2
from cluster.testing import RunningCluster
from engine.cpu.build import supported_isas
from tests.integration.asking import Asker, greedy, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not supported_isas(), reason="needs AVX2"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the default is another on a GPU"),
]

RESIDENT_MAX = 700e6
"""Bytes of a worker without its pool."""
PROMPT = list(range(1000, 1300))


def mapped(process_id: int, name: str) -> Counter[str]:
    """Return the sizes in bytes of a process's mappings whose line holds `name`, as the kernel counts them."""
    sizes: Counter[str] = Counter()
    is_wanted = False
    for line in Path(f"/proc/{process_id}/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            is_wanted = name in line
        elif is_wanted and rest.endswith(" kB"):
            sizes[key.removesuffix(":")] += int(rest.split()[0]) * 1024
    return sizes


@pytest.mark.timeout(600)
def test_by_default_workers_compute_with_the_fast_kernels_stay_small_and_share_the_weights_pages() -> None:
    async def ask(address: str) -> tuple[list[int], admin_pb2.ClusterStatus]:
        async with Asker(address) as asker:
            return (await asker.ask(request(PROMPT, greedy(8)))).token_ids, await asker.quiet_status()

    with RunningCluster("engine.pool_mib=256") as cluster:
        tokens, status = asyncio.run(ask(cluster.address))
        workers = [cluster.pids[name] for name in ("prefill-0", "decode-0")]
        everything = [mapped(process_id, "") for process_id in workers]
        pools = [mapped(process_id, "baton-kv") for process_id in workers]
        weights = [mapped(process_id, ".packed-q4") for process_id in workers]

    assert len(tokens) == 8
    assert [worker.handshake.backend for worker in status.workers] == ["cpu", "cpu"]
    assert list(status.degraded) == []
    assert min(pool["Size"] for pool in pools) > 200 << 20
    resident = [all_["Rss"] - pool["Rss"] for all_, pool in zip(everything, pools, strict=True)]
    assert max(resident) < RESIDENT_MAX, resident
    assert min(sizes["Rss"] for sizes in weights) > 60e6
    assert [sizes["Private_Clean"] + sizes["Private_Dirty"] for sizes in weights] == [0, 0]
