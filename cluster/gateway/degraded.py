"""In which ways a cluster works less well than it is configured to, in words: what would otherwise pass unseen.

Every fallback keeps answers coming, so nobody complains; each has its line here for as long as it lasts.
"""

from collections.abc import Iterator, Sequence

from baton_pb.v1 import router_pb2, worker_pb2

_PREFILL, _DECODE, _BOTH = (
    worker_pb2.WORKER_ROLE_PREFILL,
    worker_pb2.WORKER_ROLE_DECODE,
    worker_pb2.WORKER_ROLE_BOTH,
)
_Workers = Sequence[router_pb2.WorkerStatus]


def degraded(router: router_pb2.RouterStatus) -> list[str]:
    """Return one line for each way; none: everything is as it should be.

    Args:
        router: its status, or that of one that could not be asked (`router_client.away`).
    """
    if router.counters.get("unreachable"):
        return [f"the router cannot be reached: {router.policy}"]
    return [*_missing(router.workers), *_silent(router.workers), *_computing(router.workers), *_slow(router.workers)]


def _missing(workers: _Workers) -> Iterator[str]:
    prefill = [worker for worker in workers if worker.role == _PREFILL]
    decode = [worker for worker in workers if worker.role in (_DECODE, _BOTH)]
    for name, group, otherwise in (
        ("prefill", prefill, "decode workers prefill, or requests fail"),
        ("decode", decode, "requests fail"),
    ):
        unable = [worker for worker in group if worker.state != "ready"]
        if not unable:
            continue
        which = "; ".join(f"{worker.worker_id} {_state(worker)}" for worker in unable)
        if len(unable) < len(group):
            yield f"{len(unable)} of {len(group)} {name} workers cannot be used: {which}"
        else:
            yield f"no {name} worker can be used, {otherwise}: {which}"


def _state(worker: router_pb2.WorkerStatus) -> str:
    return f"{worker.state} ({worker.reason})" if worker.reason else worker.state


def _silent(workers: _Workers) -> Iterator[str]:
    for worker in workers:
        if worker.announces_nothing:
            yield f"{worker.worker_id} announces no cached block: requests are placed as if it had none"


def _computing(workers: _Workers) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for worker in workers:
        for reason in worker.handshake.slow_paths:
            by_reason.setdefault(reason, []).append(worker.worker_id)
    for reason, worker_ids in by_reason.items():
        yield f"slow path on {', '.join(worker_ids)}: {reason}"


def _slow(workers: _Workers) -> Iterator[str]:
    for worker in workers:
        for stats in worker.load.transfer_stats:
            if stats.fallbacks:
                yield f"{worker.worker_id} and {stats.peer_worker_id} use {stats.transport}, slower than expected"
