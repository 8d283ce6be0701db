"""Protocol messages <-> the core's own types."""

from baton_pb.v1 import router_pb2, transfer_pb2, worker_pb2
from cluster.router.fetch_model import FetchTotals
from cluster.router.front import Asked
from cluster.router.holder_table import Tier
from cluster.router.placement import Placement, PlacementRequest
from cluster.router.prefix_index import Snapshot
from cluster.router.router import Router
from cluster.router.step_model import StepTotals
from cluster.router.worker import Role, Worker, WorkerFacts, WorkerInfo, WorkerLoad
from cluster.service_level import ServiceLevel, priority_from_pb
from common.chain_hash import HASH_BYTES
from common.errors import InvalidRequestError

_ROLES = {
    worker_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    worker_pb2.WORKER_ROLE_DECODE: Role.DECODE,
    worker_pb2.WORKER_ROLE_BOTH: Role.BOTH,
}
_TIERS = {
    worker_pb2.CACHE_TIER_POOL: Tier.POOL,
    worker_pb2.CACHE_TIER_HOST: Tier.HOST,
    worker_pb2.CACHE_TIER_DISK: Tier.DISK,
}
_ROLES_PB = {role: number for number, role in _ROLES.items()}


def info_from_pb(address: router_pb2.WorkerAddress) -> WorkerInfo:
    """Decode an entry of the worker list.

    Raises:
        InvalidRequestError: no id, address or role.
    """
    role = _ROLES.get(address.role)
    if not address.worker_id or not address.address or role is None:
        raise InvalidRequestError(f"a worker needs id, address and role, got {address!s}")
    return WorkerInfo(address.worker_id, address.address, role, address.node)


def absent_from_pb(address: router_pb2.WorkerAddress) -> WorkerInfo:
    """Decode a worker that has no process.

    Raises:
        InvalidRequestError: no id or role.
    """
    role = _ROLES.get(address.role)
    if not address.worker_id or role is None:
        raise InvalidRequestError(f"an absent worker needs id and role, got {address!s}")
    return WorkerInfo(address.worker_id, "", role, address.node)


def absent_to_pb(info: WorkerInfo) -> router_pb2.WorkerStatus:
    """Encode a worker that has no process."""
    return router_pb2.WorkerStatus(
        worker_id=info.worker_id, role=_ROLES_PB[info.role], state="absent", reason="has no process now"
    )


def role_from_pb(role: "worker_pb2.WorkerRole.ValueType") -> Role | None:
    """Decode a role; None for one that is not known here."""
    return _ROLES.get(role)


def facts_from_pb(handshake: worker_pb2.HandshakeReply) -> WorkerFacts:
    """Decode a handshake."""
    return WorkerFacts(
        generation=handshake.generation,
        model_id=handshake.model_id,
        layout=_layout_in_words(handshake.layout),
        block_tokens=handshake.layout.block_tokens,
        hash_probe=handshake.hash_probe,
        num_blocks=handshake.num_blocks,
        context_tokens=handshake.context_tokens,
        running_max=handshake.limits.running_max,
        token_budget=handshake.limits.token_budget,
        block_bytes=handshake.block_bytes,
    )


def _layout_in_words(layout: transfer_pb2.BlockLayout) -> str:
    return (
        f"{layout.dtype} [{layout.axes}] of {layout.num_layers} layers, {layout.block_tokens} tokens, "
        f"{layout.num_kv_heads} heads, {layout.head_dim} dims"
    )


def snapshot_from_pb(snapshot: worker_pb2.CacheSnapshot) -> Snapshot:
    """Decode a snapshot."""
    return Snapshot(snapshot.hashes, snapshot.host_hashes, snapshot.disk_hashes)


def tier_from_pb(tier: "worker_pb2.CacheTier.ValueType") -> Tier:
    """Decode a tier; one that is not known here is as slow as the slowest that is."""
    return _TIERS.get(tier, Tier.DISK)


def load_from_pb(load: worker_pb2.LoadReport) -> WorkerLoad:
    """Decode a load report."""
    steps, fetches = load.steps, load.fetches
    return WorkerLoad(
        load.queued_tokens,
        load.waiting_sequences,
        load.running_sequences,
        load.draining,
        load.blocks_used,
        load.blocks_free,
        StepTotals(
            steps.steps,
            steps.seconds,
            steps.prompt_tokens,
            steps.prompt_pairs,
            steps.sequences,
            steps.context_tokens,
        )
        if load.HasField("steps")
        else None,
        FetchTotals(fetches.fetches, fetches.tokens, fetches.seconds, fetches.failed_tokens, fetches.failed_seconds),
    )


def request_from_pb(request: router_pb2.PlaceRequest) -> PlacementRequest:
    """Decode a request for a placement.

    Raises:
        InvalidRequestError: a hash of another length.
    """
    hashes = request.hashes[:]  # taken out at once: one by one they take three times as long
    if any(len(prefix) != HASH_BYTES for prefix in hashes):
        raise InvalidRequestError(f"chain hashes must have {HASH_BYTES} bytes")
    return PlacementRequest(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        max_output_tokens=request.max_output_tokens,
        hashes=tuple(hashes),
        excluded=frozenset(request.excluded_worker_ids),
        ttft_target_s=request.ttft_target_s if request.HasField("ttft_target_s") else None,
        tpot_target_s=request.tpot_target_s if request.HasField("tpot_target_s") else None,
        tenant=request.tenant,
    )


def asked_from_pb(request: router_pb2.PlaceRequest, key: str) -> Asked:
    """Decode a request for a placement, with whose it is and what it may expect.

    Raises:
        InvalidRequestError: a hash of another length, or no class that is known.
    """
    placed = request_from_pb(request)
    return Asked(
        key=key,
        request=placed,
        tenant=request.tenant,
        level=ServiceLevel(priority_from_pb(request.priority), placed.ttft_target_s, placed.tpot_target_s),
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        is_admitted=request.is_admitted,
    )


def placement_to_pb(placement: Placement) -> router_pb2.WorkerPlacement:
    """Encode a placement."""
    prefill, holder = placement.prefill, placement.holder
    return router_pb2.WorkerPlacement(
        decode_worker_id=placement.decode.worker_id,
        decode_address=placement.decode.address,
        prefill=None
        if prefill is None
        else worker_pb2.PrefillTarget(worker_id=prefill.worker_id, address=prefill.address),
        decode_hit_blocks=placement.decode_hit_blocks,
        prefill_hit_blocks=placement.prefill_hit_blocks,
        reason=placement.reason,
        predicted_ttft_s=placement.predicted_ttft_s,
        prefix_holder=None
        if holder is None
        else worker_pb2.PrefixHolder(
            worker_id=holder.worker_id, address=holder.address, num_blocks=placement.holder_blocks
        ),
    )


def cluster_facts(router: Router) -> router_pb2.ClusterFacts | None:
    """Return what gateways must know of the workers; None while nothing is known."""
    agreed = router.agreed()
    if agreed is None:
        return None
    return router_pb2.ClusterFacts(
        model_id=agreed.model_id, block_tokens=agreed.block_tokens, context_tokens=router.context_tokens
    )


def worker_to_pb(
    worker: Worker,
    load: worker_pb2.LoadReport | None,
    handshake: worker_pb2.HandshakeReply | None,
    announces_nothing: bool,
) -> router_pb2.WorkerStatus:
    """Encode a row, with the worker's last messages as they came."""
    info = worker.info
    return router_pb2.WorkerStatus(
        worker_id=info.worker_id,
        role=_ROLES_PB[info.role],
        node=info.node,
        address=info.address,
        state=worker.state.value,
        load=load,
        handshake=handshake,
        reservations=worker.account.reservations,
        reason=worker.reason,
        announces_nothing=announces_nothing,
    )
