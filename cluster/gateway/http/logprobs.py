"""Log probabilities of sampled tokens, in the two shapes of OpenAI's API."""

import math
from collections.abc import Sequence
from typing import Any

from baton_pb.v1 import common_pb2
from common.text import Text

_LOWEST = -9999.0
"""JSON has no -Infinity; OpenAI and vLLM write this."""


def chat_logprobs(text: Text, tokens: Sequence[common_pb2.SampledToken]) -> dict[str, Any]:
    """Return `logprobs` of a chat choice."""
    return {"content": [_chat_token(text, token) for token in tokens], "refusal": None}


def _chat_token(text: Text, token: common_pb2.SampledToken) -> dict[str, Any]:
    top = [_entry(text, alternative.token_id, alternative.logprob) for alternative in token.top]
    return {**_entry(text, token.token_id, token.logprob), "top_logprobs": top}


def _entry(text: Text, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": text.token(token_id), "logprob": _finite(logprob), "bytes": list(text.token_bytes(token_id))}


def completion_logprobs(text: Text, tokens: Sequence[common_pb2.SampledToken], offset: int) -> dict[str, Any]:
    """Return `logprobs` of a completion choice.

    Args:
        text: the model's.
        tokens: with their logprobs.
        offset: characters of the choice before the first of them.
    """
    texts = [text.token(token.token_id) for token in tokens]
    offsets = []
    for one in texts:
        offsets.append(offset)
        offset += len(one)
    top = []
    for own, token in zip(texts, tokens, strict=True):
        alternatives = {text.token(entry.token_id): _finite(entry.logprob) for entry in token.top}
        top.append({**alternatives, own: _finite(token.logprob)})
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
