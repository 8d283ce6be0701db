"""`baton explain`: why a request went where it did, as text for people or JSON for programs."""

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baton_pb.v1 import router_pb2
from cluster.client import Client
from common.errors import NotFoundError

_WIDTH = 160
"""Of a table that goes to a file or a pipe."""


def explain(client: Client, request_id: str, as_json: bool) -> None:
    """Print a request's placements.

    Raises:
        NotFoundError: the router does not remember it.
        BatonError: the cluster cannot be asked.
    """
    with client:
        reply = _ask(client, request_id)
    if as_json:
        print(json.dumps(explanations_json(reply), indent=2))  # noqa: T201 - the command's output
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for placement in reply.placements:
        console.print(headline(placement))
        console.print(_table(placement))


def _ask(client: Client, request_id: str) -> router_pb2.ExplainReply:
    """Ask for a request by its id, or by the id of its answer over HTTP, which has the kind of answer before it."""
    bare = request_id.removeprefix("chat").removeprefix("cmpl-")
    try:
        return client.explain(request_id)
    except NotFoundError:
        if not request_id.endswith(f"cmpl-{bare}"):
            raise
        return client.explain(bare)


def explanations_json(reply: router_pb2.ExplainReply) -> list[dict[str, Any]]:
    """Return a request's placements as one list; times are seconds. Changes only by addition."""
    return [
        {
            "request_id": placement.request_id,
            "policy": placement.policy,
            "reason": placement.reason,
            "decode_worker": placement.decode_worker_id,
            "prefill_worker": placement.prefill_worker_id if placement.HasField("prefill_worker_id") else None,
            "predicted_ttft": placement.predicted_ttft_s,
            "observed_ttft": placement.observed_ttft_s if placement.HasField("observed_ttft_s") else None,
            "considered": [
                {
                    "decode_worker": pair.decode_worker_id,
                    "prefill_worker": pair.prefill_worker_id if pair.HasField("prefill_worker_id") else None,
                    "is_chosen": pair.is_chosen,
                    "meets_targets": pair.meets_targets,
                    "total": pair.total_s,
                    "ttft": pair.ttft_s,
                    "tpot": pair.tpot_s,
                    "cached_tokens": pair.cached_tokens,
                    "terms": {term.name: term.seconds for term in pair.terms},
                }
                for pair in placement.considered
            ],
        }
        for placement in reply.placements
    ]


def headline(placement: router_pb2.PlacementExplanation) -> str:
    """Return what was chosen, and how well that was predicted."""
    prefill = placement.prefill_worker_id if placement.HasField("prefill_worker_id") else "local prefill"
    observed = f"{placement.observed_ttft_s * 1000:.0f} ms" if placement.HasField("observed_ttft_s") else "not yet"
    return (
        f"{placement.request_id}: {prefill} -> {placement.decode_worker_id}, by {placement.policy}; first token "
        f"{placement.predicted_ttft_s * 1000:.0f} ms after the placement predicted, {observed} observed"
    )


def _table(placement: router_pb2.PlacementExplanation) -> Table:
    """Return the pairs and the terms of their costs; terms that are zero everywhere are left out."""
    names = [
        name
        for name in dict.fromkeys(term.name for pair in placement.considered for term in pair.terms)
        if any(term.seconds for pair in placement.considered for term in pair.terms if term.name == name)
    ]
    table = Table(box=box.SIMPLE)
    for column in ("", "prefill", "decode", "cached", *names, "sum, ms"):
        table.add_column(column, justify="left" if column in ("", "prefill", "decode") else "right")
    for pair in placement.considered:
        terms = {term.name: term.seconds for term in pair.terms}
        mark = "chosen" if pair.is_chosen else "" if pair.meets_targets else "too late"
        prefill = pair.prefill_worker_id if pair.HasField("prefill_worker_id") else "(local)"
        cells = [f"{terms.get(name, 0.0) * 1000:.1f}" for name in names]
        total = f"{pair.total_s * 1000:.1f}"
        table.add_row(mark, prefill, pair.decode_worker_id, str(pair.cached_tokens), *cells, total)
    return table
