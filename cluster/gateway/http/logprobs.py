"""Log probabilities of sampled tokens, in the two shapes of OpenAI's API."""

import math
from collections.abc import Sequence
from typing import Any

from baton_pb.v1 import common_pb2
from common.text import Text

_LOWEST = -9999.0
"""JSON has no -Infinity; OpenAI and vLLM write this."""


def chat_logprobs(text: Text, tokens: Sequence[common_pb2.SampledToken], as_ids: bool = False) -> dict[str, Any]:
    """Return `logprobs` of a chat choice; `as_ids`: tokens by their ids instead of their texts."""
    return {"content": [_chat_token(text, token, as_ids) for token in tokens], "refusal": None}


def _chat_token(text: Text, token: common_pb2.SampledToken, as_ids: bool) -> dict[str, Any]:
    top = [_entry(text, alternative.token_id, alternative.logprob, as_ids) for alternative in token.top]
    return {**_entry(text, token.token_id, token.logprob, as_ids), "top_logprobs": top}


def _entry(text: Text, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    token = _name(text, token_id, as_ids)
    return {"token": token, "logprob": _finite(logprob), "bytes": list(text.token_bytes(token_id))}


def _name(text: Text, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text.token(token_id)


def completion_logprobs(
    text: Text, tokens: Sequence[common_pb2.SampledToken], offset: int, as_ids: bool = False
) -> dict[str, Any]:
    """Return `logprobs` of a completion choice.

    Args:
        text: the model's.
        tokens: with their logprobs.
        offset: characters of the choice before the first of them.
        as_ids: tokens by their ids instead of their texts.
    """
    texts = [_name(text, token.token_id, as_ids) for token in tokens]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(text.token(token.token_id))
    top = []
    for own, token in zip(texts, tokens, strict=True):
        alternatives = {_name(text, entry.token_id, as_ids): _finite(entry.logprob) for entry in token.top}
        top.append({**alternatives, own: _finite(token.logprob)})
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
