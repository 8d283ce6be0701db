"""A part that works in a reduced way is named by `baton status`, counted by /metrics, and never passes in silence."""

from pathlib import Path
from typing import Any

import pytest

from baton_pb.v1 import router_pb2, worker_pb2
from cluster.gateway.degraded import degraded
from common.errors import WorkerLostError
from tests.cluster.fake_cluster import DECODE, PREFILL, FakeCluster, address_of, fake_cluster, request, run, until
from tests.cluster.gateway.http.wire import get


def worker(
    worker_id: str, role: "worker_pb2.WorkerRole.ValueType", state: str = "ready", **more: Any
) -> router_pb2.WorkerStatus:
    return router_pb2.WorkerStatus(worker_id=worker_id, role=role, state=state, **more)


SLOW = worker_pb2.LoadReport(
    transfer_stats=[
        worker_pb2.TransferStats(peer_worker_id="d0", transport="tcp", fallbacks=1),
        worker_pb2.TransferStats(peer_worker_id="d1", transport="shm"),
    ]
)
NO_COMPILER, NO_AVX2 = (
    "backend reference computes: backend cpu: no C++ compiler found",
    "backend reference computes: backend cpu: this machine has no AVX2",
)
MEMMOVE = "blocks are copied by memmove, run by run: no C++ compiler found"
CASES = [
    pytest.param([worker("p0", PREFILL), worker("d0", DECODE)], [], id="whole"),
    pytest.param(
        [worker("p0", PREFILL, "lost", reason="no report for 3 s"), worker("d0", DECODE)],
        ["no prefill worker can be used, decode workers prefill, or requests fail: p0 lost (no report for 3 s)"],
        id="no prefill",
    ),
    pytest.param(
        [worker("p0", PREFILL), worker("d0", DECODE, "draining"), worker("d1", DECODE)],
        ["1 of 2 decode workers cannot be used: d0 draining"],
        id="one of two",
    ),
    pytest.param(
        [worker("d0", worker_pb2.WORKER_ROLE_BOTH, "absent")],
        ["no decode worker can be used, requests fail: d0 absent"],
        id="nobody",
    ),
    pytest.param(
        [worker("p0", PREFILL, load=SLOW), worker("d0", DECODE, announces_nothing=True)],
        [
            "d0 announces no cached block: requests are placed as if it had none",
            "p0 and d0 use tcp, slower than expected",
        ],
        id="silent and slow",
    ),
    pytest.param(
        [
            worker("p0", PREFILL, handshake=worker_pb2.HandshakeReply(slow_paths=[NO_COMPILER, MEMMOVE])),
            worker("d0", DECODE, handshake=worker_pb2.HandshakeReply(slow_paths=[NO_COMPILER, MEMMOVE])),
            worker("d1", DECODE, handshake=worker_pb2.HandshakeReply(slow_paths=[NO_AVX2])),
            worker("d2", DECODE, handshake=worker_pb2.HandshakeReply(backend="cpu")),
        ],
        [
            f"slow path on p0, d0: {NO_COMPILER}",
            f"slow path on p0, d0: {MEMMOVE}",
            f"slow path on d1: {NO_AVX2}",
        ],
        id="computing slowly",
    ),
]


@pytest.mark.parametrize(("workers", "lines"), CASES)
def test_each_reduction_has_its_line(workers: list[router_pb2.WorkerStatus], lines: list[str]) -> None:
    assert degraded(router_pb2.RouterStatus(workers=workers)) == lines


async def told(cluster: FakeCluster) -> tuple[list[str], bool, set[str]]:
    """Return what `baton status`, /ready and /metrics say."""
    page = (await get(cluster, "/metrics")).body.decode().splitlines()
    ours = {
        line for line in page if line.startswith(("baton_degraded ", "baton_router_local_prefill_fallbacks_total "))
    }
    return list((await cluster.status()).degraded), (await get(cluster, "/ready")).json["is_degraded"], ours


@pytest.mark.parametrize("is_absent", [False, True], ids=["lost", "absent"])
def test_prefill_on_decode_workers_for_want_of_others_is_said_counted_and_over_when_they_are_back(
    model_dir: Path, is_absent: bool
) -> None:
    """FIELD_PROBLEMS 55. Absent: its process has died and the supervisor has taken it out of the list."""

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            zero, one = "baton_router_local_prefill_fallbacks_total 0", "baton_router_local_prefill_fallbacks_total 1"
            assert await told(cluster) == ([], False, {"baton_degraded 0", zero})

            await cluster.worker("p0").kill()
            if is_absent:
                gone = router_pb2.WorkerAddress(worker_id="p0", role=PREFILL)
                await cluster.router.set_workers([address_of(cluster.worker("d0"))], [gone])
            else:
                await until(lambda: cluster.states()["p0"] == "lost", "not noticed")
            answer = await cluster.ask(request("hello", max_tokens=2))

            assert not answer.finished.placement.HasField("prefill_worker_id")
            reasons, is_degraded, page = await told(cluster)
            assert [reason.split(" (")[0] for reason in reasons] == [
                f"no prefill worker can be used, decode workers prefill, or requests fail: p0 {cluster.states()['p0']}"
            ]
            assert (is_degraded, page) == (True, {"baton_degraded 1", one})

            await cluster.restart_worker("p0")
            await cluster.set_workers()
            await cluster.all_ready()
            assert await told(cluster) == ([], False, {"baton_degraded 0", one})

    run(scenario())


def test_a_gateway_without_its_router_says_so(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, router_wait_s=0.1) as cluster:
            await cluster.router.stop()

            with pytest.raises(WorkerLostError):
                await cluster.ask(request("hello", max_tokens=2))
            [reason] = (await cluster.status()).degraded
            assert reason.startswith("the router cannot be reached")
            assert b"\nbaton_degraded 1\n" in (await get(cluster, "/metrics")).body
            await cluster.restart_router()
            await cluster.all_ready()

    run(scenario())
