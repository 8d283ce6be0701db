"""Why a request went where it did, in the trailing metadata of its own answer, for those who ask for it."""

from collections.abc import Iterable

from google.protobuf import json_format

from baton_pb.v1 import router_pb2

ASK_KEY, ANSWER_KEY = "baton-explain", "baton-explanation"
"""Request metadata (any value but 0) that asks for it; trailing metadata that has it, as JSON of ExplainReply."""
_BYTES_MAX = 6000
"""gRPC refuses 8 KiB of metadata; beyond this only what was chosen is told."""


def wants_explanation(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call asks for an explanation."""
    return any(key == ASK_KEY and value not in ("0", b"0", "") for key, value in metadata or ())


def explanation_metadata(reply: router_pb2.ExplainReply) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata."""
    text = _json(reply)
    if len(text) > _BYTES_MAX:
        short = router_pb2.ExplainReply()
        short.CopyFrom(reply)
        for placement in short.placements:
            chosen = [pair for pair in placement.considered if pair.is_chosen]
            del placement.considered[:]
            placement.considered.extend(chosen[:1])
        while len(text := _json(short)) > _BYTES_MAX:
            del short.placements[len(short.placements) // 2 :]  # of many choices the first ones
    return ((ANSWER_KEY, text),)


def _json(reply: router_pb2.ExplainReply) -> str:
    # ASCII: what else is in a request id is escaped.
    return json_format.MessageToJson(
        reply, preserving_proto_field_name=True, indent=None, always_print_fields_with_no_presence=False
    )
