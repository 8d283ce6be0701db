"""What workers say of their transfers is on the gateway's page, by pair and transport."""

from baton_pb.v1 import router_pb2, worker_pb2
from cluster.gateway.counts import Counts
from cluster.gateway.metrics import Metrics
from cluster.tenants.quotas import Uses
from common.clock import MonotonicClock


def test_bytes_times_refusals_and_fallbacks_are_told_for_each_pair() -> None:
    clock = MonotonicClock()
    stats = [
        worker_pb2.TransferStats(
            peer_worker_id="decode-0", transport="tcp", bytes=2048, seconds=0.5, exposed_seconds=0.25, fallbacks=1
        ),
        worker_pb2.TransferStats(peer_worker_id="decode-1", transport="shm", bytes=64, refusals=3),
    ]
    worker = router_pb2.WorkerStatus(worker_id="prefill-0", load=worker_pb2.LoadReport(transfer_stats=stats))

    lines = Metrics("m", Counts(1), Uses(clock), clock).page(router_pb2.RouterStatus(workers=[worker])).splitlines()

    pair = '{worker="prefill-0",peer="decode-0",transport="tcp"}'
    other = '{worker="prefill-0",peer="decode-1",transport="shm"}'
    for line in (
        f"baton_transfer_bytes_total{pair} 2048",
        f"baton_transfer_seconds_total{pair} 0.5",
        f"baton_transfer_exposed_seconds_total{pair} 0.25",
        f"baton_transfer_fallbacks_total{pair} 1",
        f"baton_transfer_bytes_total{other} 64",
        f"baton_transfer_refusals_total{other} 3",
    ):
        assert line in lines
