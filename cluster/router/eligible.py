"""Who may be chosen for a request at all: ready, not excluded, with a pool that holds it."""

from cluster.router.placement import PlacementRequest
from cluster.router.question import Group
from cluster.router.worker import Role
from cluster.router.worker_table import WorkerTable
from common.errors import InvalidRequestError, WorkerLostError

DECODERS = (Role.DECODE, Role.BOTH)
RETRY_AFTER_S = 1.0
"""A worker that died is replaced, or noticed to live, in about this time at best."""


def eligible_decoders(workers: WorkerTable, request: PlacementRequest) -> Group:
    """Return those that can decode a request now, if any can finish it only these.

    Raises:
        WorkerLostError: nobody can decode now.
        InvalidRequestError: no worker's pool could ever hold the prompt.
    """
    ready = workers.ready(*DECODERS)
    if ready.workers and not request.excluded and ready.all_finish(request.num_tokens, request.max_output_tokens):
        return ready.candidates
    decoders = [worker for worker in ready.workers if worker.info.worker_id not in request.excluded]
    if not decoders:
        states = workers.states(*DECODERS)
        failed = f"; {', '.join(sorted(request.excluded))} failed this request" if request.excluded else ""
        raise WorkerLostError(f"no decode worker can take a request: {states}{failed}", RETRY_AFTER_S)
    roomy = [worker for worker in decoders if worker.holds(request.num_tokens)]
    if not roomy:
        largest = max(worker.facts.pool_tokens for worker in decoders if worker.facts is not None)
        raise InvalidRequestError(
            f"prompt has {request.num_tokens} tokens, the largest pool of a worker holds {largest}, output included"
        )
    ample = [worker for worker in roomy if worker.can_finish(request.num_tokens, request.max_output_tokens)]
    # Who cannot finish it will say so, with need and limit.
    return Group([worker.candidate for worker in ample or roomy])


def without_fallback(workers: WorkerTable, decode: Group, prefill: Group) -> Group:
    """Return the decoders that need not stand in for a prefill worker.

    Raises:
        WorkerLostError: all would have to.
    """
    if len(prefill) or not workers.num_configured(Role.PREFILL):
        return decode
    alone = [candidate for candidate in decode if candidate.prefills_itself]
    if not alone:
        states = workers.states(Role.PREFILL)
        raise WorkerLostError(
            f"no prefill worker can take the prompt ({states}), and nobody may instead", RETRY_AFTER_S
        )
    return Group(alone)


def eligible_prefillers(workers: WorkerTable, request: PlacementRequest) -> Group:
    """Return the prefill workers that can take a prompt now; perhaps none."""
    ready = workers.ready(Role.PREFILL)
    if not request.excluded and request.num_tokens < ready.pool_tokens:
        return ready.candidates
    return Group(
        [
            worker.candidate
            for worker in ready.workers
            if worker.info.worker_id not in request.excluded and worker.holds(request.num_tokens)
        ]
    )
