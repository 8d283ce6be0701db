"""Whether a request could be placed now, as every face tells it."""

from typing import NamedTuple

from baton_pb.v1 import worker_pb2
from cluster.gateway.degraded import degraded
from cluster.gateway.router_client import RouterClient
from common.errors import WorkerLostError

_RETRY_AFTER_S = 1.0
_DECODING = (worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_BOTH)


class Readiness(NamedTuple):
    """Of a cluster that serves."""

    workers: int
    """Those that could decode a request."""
    is_degraded: bool
    """It does not work as well as it is configured to; `baton status` says why."""


async def readiness(router: RouterClient) -> Readiness:
    """Return how ready the cluster is.

    Raises:
        WorkerLostError: none, or the router is away.
    """
    status = await router.status()
    able = [worker for worker in status.workers if worker.state == "ready" and worker.role in _DECODING]
    if not able:
        known = ", ".join(f"{worker.worker_id} {worker.state}" for worker in status.workers) or "none"
        raise WorkerLostError(f"no worker is ready to decode; known: {known}", _RETRY_AFTER_S)
    return Readiness(len(able), bool(degraded(status)))
