"""How a request wants its tokens chosen: the validated form of the SamplingParams message."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from baton_pb.v1 import common_pb2
from common.errors import InvalidRequestError

LOGPROBS_MAX = 20
"""Most alternatives that a request may ask to see for each token."""
IDS_MAX = 1024
"""Most entries of logit_bias and of stop_token_ids: they are looked at in every step."""
PENALTY_MAX = 100.0
BIAS_MAX = 1000.0
TEMPERATURE_MAX = 100.0
GREEDY_BELOW = 1e-4
"""A temperature below this is greedy: logits divided by it would overflow to ties."""

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules of one request; the defaults are plain greedy decoding up to the context window.

    `seed` and the position in the output fix every random draw, so a sequence may move between workers.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    constraint: str | None = None
    """A grammar that the output must obey, see common/grammar.py."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """Whether a token is that of the model's greatest logit, and nothing but the token is asked for."""
        return (
            self.is_greedy
            and self.logprobs is None
            and self.constraint is None
            and self.repetition_penalty == 1.0
            and not (self.presence_penalty or self.frequency_penalty or self.logit_bias)
        )

    @classmethod
    def from_pb(cls, params: common_pb2.SamplingParams, vocab_tokens: int | None = None) -> "SamplingParams":
        """Validate a message. Stop strings are ignored: they are the gateway's.

        Args:
            params: unset fields take the defaults that the message documents; an unset seed is 0.
            vocab_tokens: size of the vocabulary, to refuse token ids outside of it; None: not checked.

        Raises:
            InvalidRequestError: naming the field, its limits and the value.
        """
        max_tokens = params.max_tokens if params.HasField("max_tokens") else None
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {max_tokens}")
        if max_tokens is not None and params.min_tokens > max_tokens:
            raise InvalidRequestError(f"min_tokens is {params.min_tokens}, more than max_tokens {max_tokens}")
        repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        if repetition == 0.0:
            raise InvalidRequestError("repetition_penalty must be above 0, got 0.0")
        top_p = params.top_p if params.HasField("top_p") else 1.0
        if top_p == 0.0:
            raise InvalidRequestError("top_p must be in (0, 1], got 0.0")
        logprobs = params.logprobs if params.HasField("logprobs") else None
        if logprobs is not None and logprobs > LOGPROBS_MAX:
            raise InvalidRequestError(f"logprobs must be at most {LOGPROBS_MAX}, got {logprobs}")
        temperature = params.temperature if params.HasField("temperature") else 1.0
        if params.HasField("grammar"):
            raise InvalidRequestError("grammar must be a constraint when it comes to a worker: the gateway makes it")
        if params.constraint and params.ignore_eos:
            raise InvalidRequestError("ignore_eos has no meaning with a grammar, which ends the output by itself")
        return cls(
            max_tokens=max_tokens,
            temperature=_within("temperature", temperature, 0.0, TEMPERATURE_MAX),
            top_p=_within("top_p", top_p, 0.0, 1.0),
            top_k=params.top_k,
            min_p=_within("min_p", params.min_p, 0.0, 1.0),
            seed=params.seed,
            stop_token_ids=frozenset(_token_ids("stop_token_ids", params.stop_token_ids, vocab_tokens)),
            ignore_eos=params.ignore_eos,
            repetition_penalty=_within("repetition_penalty", repetition, 0.0, PENALTY_MAX),
            presence_penalty=_within("presence_penalty", params.presence_penalty, -PENALTY_MAX, PENALTY_MAX),
            frequency_penalty=_within("frequency_penalty", params.frequency_penalty, -PENALTY_MAX, PENALTY_MAX),
            logprobs=logprobs,
            min_tokens=params.min_tokens,
            logit_bias=_bias(params.logit_bias, vocab_tokens),
            constraint=params.constraint or None,
        )

    def to_pb(self) -> common_pb2.SamplingParams:
        """Encode for another worker; `from_pb` gives back an equal value (floats are rounded to 32 bits once)."""
        return common_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop_token_ids=sorted(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.logprobs,
            min_tokens=self.min_tokens,
            logit_bias=dict(self.logit_bias),
            constraint=self.constraint or "",
        )


def _within(name: str, value: float, low: float, high: float) -> float:
    # NaN compares false with everything, so it is refused here as well.
    if not low <= value <= high or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be in [{low:g}, {high:g}], got {value}")
    return value


def _token_ids(name: str, token_ids: Iterable[int], vocab_tokens: int | None) -> list[int]:
    ids = list(token_ids)
    if len(ids) > IDS_MAX:
        raise InvalidRequestError(f"{name} must have at most {IDS_MAX} entries, got {len(ids)}")
    if vocab_tokens is not None and ids and max(ids) >= vocab_tokens:
        raise InvalidRequestError(f"{name} must name tokens below {vocab_tokens}, got {max(ids)}")
    return ids


def _bias(bias: Mapping[int, float], vocab_tokens: int | None) -> Mapping[int, float]:
    ids = _token_ids("logit_bias", bias, vocab_tokens)
    return MappingProxyType({i: _within(f"logit_bias[{i}]", bias[i], -BIAS_MAX, BIAS_MAX) for i in ids})
