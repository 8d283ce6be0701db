"""How answers and states look: as text for people, as JSON for programs. The JSON changes only by addition."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baton_pb.v1 import admin_pb2, common_pb2, inference_pb2, worker_pb2

_ROLES = {
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
    worker_pb2.WORKER_ROLE_BOTH: "both",
}
_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


def answer_json(responses: Iterable[inference_pb2.GenerateResponse]) -> dict[str, Any]:
    """Return a whole answer as one object; times are seconds."""
    text, token_ids, finished, request_id = "", list[int](), inference_pb2.Finished(), ""
    for response in responses:
        request_id = response.request_id
        text += response.text
        token_ids += response.token_ids
        if response.HasField("finished"):
            finished = response.finished
    return {
        "request_id": request_id,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": _REASONS.get(finished.reason, "unspecified"),
        "stop": finished.stop or None,
        "usage": {
            "prompt": finished.usage.prompt_tokens,
            "cached": finished.usage.cached_tokens,
            "output": finished.usage.output_tokens,
        },
        "timing": _timing_json(finished.timing),
        "placement": _placement_json(finished.placement),
    }


def _timing_json(timing: common_pb2.Timing) -> dict[str, float | None]:
    return {
        "ttft": timing.ttft_s,
        "queue": timing.queue_s,
        "prefill": timing.prefill_s,
        "transfer_exposed": timing.transfer_exposed_s,
        "first_decode": timing.first_decode_s,
        "tpot": timing.tpot_s if timing.HasField("tpot_s") else None,
        "total": timing.total_s,
    }


def _placement_json(placement: common_pb2.Placement) -> dict[str, str | None]:
    return {
        "prefill_worker": placement.prefill_worker_id if placement.HasField("prefill_worker_id") else None,
        "decode_worker": placement.decode_worker_id,
        "transport": placement.transport,
        "reason": placement.reason,
    }


def finished_line(last: inference_pb2.GenerateResponse) -> str:
    """Return the timing breakdown, the placement and the id of an answer whose last message this is, for people."""
    finished = last.finished
    timing, usage, placement = finished.timing, finished.usage, finished.placement
    prefill = placement.prefill_worker_id if placement.HasField("prefill_worker_id") else "local prefill"
    tpot = f"{timing.tpot_s * 1000:.1f} ms a token" if timing.HasField("tpot_s") else "one token"
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.output_tokens} output tokens; "
        f"first token {timing.ttft_s * 1000:.0f} ms = queue {timing.queue_s * 1000:.0f} + prefill "
        f"{timing.prefill_s * 1000:.0f}; then transfer {timing.transfer_exposed_s * 1000:.1f} + first decode "
        f"{timing.first_decode_s * 1000:.1f} ms, {tpot}; "
        f"{prefill} -> {placement.decode_worker_id} over {placement.transport or '?'}; {last.request_id}"
    )


def status_json(status: admin_pb2.ClusterStatus) -> dict[str, Any]:
    """Return the cluster's status as one object."""
    return {
        "workers": [_worker_json(worker) for worker in status.router.workers or status.workers],
        "router": {
            "policy": status.router.policy,
            "reservations": status.router.reservations,
            "queued": status.router.queued,
            "indexed_blocks": status.router.indexed_blocks,
            "placements_total": status.router.placements_total,
            "counters": dict(status.router.counters),
        },
        "gateway": {
            "id": status.gateway.gateway_id,
            "address": status.gateway.address,
            "running_requests": status.gateway.running_requests,
            "queued_requests": status.gateway.queued_requests,
            "requests_total": status.gateway.requests_total,
            "errors_total": dict(status.gateway.errors_total),
            "counters": dict(status.gateway.counters),
        },
        "degraded": list(status.degraded),
        "transports": list(status.transports),
        "model": {
            "id": status.model.id,
            "context_tokens": status.model.context_tokens,
            "vocab_tokens": status.model.vocab_tokens,
            "has_chat_template": status.model.has_chat_template,
        },
        "uptime": status.uptime_s,
    }


def _worker_json(worker: Any) -> dict[str, Any]:
    load = worker.load
    return {
        "id": worker.worker_id,
        "role": _ROLES.get(worker.role, "unspecified"),
        "node": worker.node,
        "address": worker.address,
        "state": worker.state,
        "blocks": {"free": load.blocks_free, "used": load.blocks_used, "kept": load.blocks_kept},
        "queued_tokens": load.queued_tokens,
        "waiting_sequences": load.waiting_sequences,
        "running_sequences": load.running_sequences,
        "transfers": load.transfers,
        "reservations": worker.reservations,
        "backend": worker.handshake.backend,
        "slow_paths": list(worker.handshake.slow_paths),
        "counters": dict(load.counters),
        "transfer_stats": [
            {
                "peer": stats.peer_worker_id,
                "transport": stats.transport,
                "bytes": stats.bytes,
                "pieces": stats.pieces,
                "refusals": stats.refusals,
                "seconds": stats.seconds,
                "exposed_seconds": stats.exposed_seconds,
                "frames": stats.frames,
                "fallbacks": stats.fallbacks,
                "probed_bytes_per_s": stats.probed_bytes_per_s,
            }
            for stats in load.transfer_stats
        ],
    }


def print_status(console: Console, status: dict[str, Any]) -> None:
    """Print what `status_json` returned as a table."""
    model, router, gateway = status["model"], status["router"], status["gateway"]
    console.print(f"model {model['id']}, up {status['uptime']:.0f} s, gateway {gateway['address']}")
    for reason in status["degraded"]:
        console.print(f"degraded: {reason}", style="yellow", markup=False)
    console.print(
        f"router: policy {router['policy']}, {router['indexed_blocks']} blocks indexed, "
        f"{router['reservations']} reservations, {router['queued']} queued; "
        f"gateway: {gateway['running_requests']} running, "
        f"{gateway['requests_total']} requests so far; transports: {', '.join(status['transports']) or 'none used yet'}"
    )
    table = Table(box=box.SIMPLE, title="blocks: free, used, kept; queued: tokens", title_justify="left")
    for heading in ("worker", "role", "node", "backend", "state", "free", "used", "kept", "queued", "running"):
        table.add_column(heading, no_wrap=True)
    for worker in status["workers"]:
        blocks = worker["blocks"]
        cells = (
            *(worker[key] for key in ("id", "role", "node", "backend", "state")),
            *(blocks[key] for key in ("free", "used", "kept")),
            *(worker[key] for key in ("queued_tokens", "running_sequences")),
        )
        table.add_row(*(str(cell) for cell in cells))
    console.print(table)
    if any(worker["transfer_stats"] for worker in status["workers"]):
        console.print(_pairs(status["workers"]))


def _pairs(workers: list[dict[str, Any]]) -> Table:
    """Return what each worker has moved with each peer; `slow` counts connections that were not what was expected."""
    table = Table(box=box.SIMPLE, title="KV transfers; rate: measured when they connected", title_justify="left")
    for heading in ("worker", "peer", "over", "rate", "moved", "pieces", "frames", "exposed", "refused", "slow"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("worker", "peer", "over") else "right")
    for worker in workers:
        for stats in worker["transfer_stats"]:
            rate = stats["probed_bytes_per_s"]
            table.add_row(
                *(worker["id"], stats["peer"], stats["transport"]),
                f"{rate / 1e9:.2f} GB/s" if rate else "?",
                f"{stats['bytes'] / 1e6:.1f} MB",
                *(str(stats[key]) for key in ("pieces", "frames")),
                f"{stats['exposed_seconds'] * 1000:.1f} ms",
                *(str(stats[key]) for key in ("refusals", "fallbacks")),
            )
    return table
