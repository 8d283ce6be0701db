"""Who is left out at the next try follows from who told of the failure, and how."""

import pytest

from baton_pb.v1 import router_pb2, worker_pb2
from cluster.gateway.decode_client import SessionLostError
from cluster.gateway.failures import Failures
from common.errors import BatonError, OverloadedError, TransferError, WorkerLostError

REMOTE = router_pb2.WorkerPlacement(decode_worker_id="d0", prefill=worker_pb2.PrefillTarget(worker_id="p0"))
OTHER = router_pb2.WorkerPlacement(decode_worker_id="d0", prefill=worker_pb2.PrefillTarget(worker_id="p1"))
LOCAL = router_pb2.WorkerPlacement(decode_worker_id="d0")


@pytest.mark.parametrize(
    ("attempts", "excluded"),
    [
        pytest.param([(SessionLostError("x"), REMOTE)], {"d0"}, id="its session broke"),
        pytest.param([(WorkerLostError("x"), REMOTE)], {"p0"}, id="it tells of a loss"),
        pytest.param([(TransferError("x"), REMOTE)], {"p0"}, id="it tells of a broken transfer"),
        pytest.param([(WorkerLostError("x"), LOCAL)], {"d0"}, id="it was alone"),
        pytest.param([(OverloadedError("x"), REMOTE)], {"d0", "p0"}, id="no room somewhere"),
        pytest.param(
            [(TransferError("x"), REMOTE), (TransferError("x"), OTHER)], {"p0", "p1", "d0"}, id="it tells of two"
        ),
    ],
)
def test_the_guilty_are_left_out(
    attempts: list[tuple[BatonError, router_pb2.WorkerPlacement]], excluded: set[str]
) -> None:
    failures = Failures()

    for error, placement in attempts:
        failures.add(error, placement)

    assert failures.excluded == excluded
    assert failures.last is attempts[-1][0]
