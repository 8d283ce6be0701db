"""Fields that requests share: what is understood, what is ignored, what is refused, and the message for the workers."""

from collections.abc import Sequence
from typing import Annotated, Literal

import pydantic
from pydantic import Field, JsonValue

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.choices import CHOICES_MAX
from cluster.gateway.http.base import Fields, Ignored, Only
from cluster.gateway.http.structured import StructuredFields
from cluster.gateway.request import (
    BIAS_MAX,
    CACHE_SALT_CHARACTERS_MAX,
    IDS_MAX,
    LOGPROBS_MAX,
    PENALTY_MAX,
    STOP_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    TEMPERATURE_MAX,
)
from cluster.service_level import TARGET_MAX_S, Priority, priority_to_pb

TOKENS_MAX = 2**31 - 1
REQUEST_ID_PATTERN = r"^[!-~]{1,64}$"
_ID_MAX = 2**32 - 1


TokenId = Annotated[int, Field(ge=0, le=_ID_MAX)]
TokenIdList = Annotated[list[TokenId], Field(max_length=IDS_MAX, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS_MAX)]
Count = Annotated[int, Field(ge=1, le=TOKENS_MAX)]
Penalty = Annotated[float, Field(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Bias = Annotated[float, Field(ge=-BIAS_MAX, le=BIAS_MAX)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token id as a key of a JSON object."""
Target = Annotated[float, Field(gt=0, le=TARGET_MAX_S)]


def _named(priority: JsonValue) -> JsonValue:
    if type(priority) is not int:
        return priority
    return "normal" if priority == 0 else "high" if priority < 0 else "low"


class StreamOptions(Fields):
    """What else a stream says."""

    include_usage: bool | None = None
    """End with an event that has no choices and the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Every event has the usage so far."""
    include_obfuscation: Ignored = None


class SamplingFields(StructuredFields):
    """Fields of both kinds of completions."""

    model: str = ""
    """The served model's id; it may be left out."""
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    """Choices for each prompt. Choice i has the seed `seed + i`."""
    stream: bool | None = None
    """Server-sent events, ending with `data: [DONE]`."""
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = None
    """0 is greedy; 1 unless given."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """The same seed gives the same tokens; drawn unless given."""
    stop: Stop | Annotated[list[Stop], Field(max_length=STOP_STRINGS_MAX, fail_fast=True)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=IDS_MAX)] | None = None
    """Token id -> what is added to its logit."""

    # Extensions, named as in vLLM's server.
    top_k: Annotated[int, Field(ge=-1, le=_ID_MAX)] | None = None
    """0 or -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=PENALTY_MAX)] | None = None
    """1 is off."""
    min_tokens: Annotated[int, Field(ge=0, le=TOKENS_MAX)] | None = None
    """Fewest tokens before a stop token may end the answer."""
    stop_token_ids: TokenIdList | None = None
    ignore_eos: bool | None = None
    """Only max_tokens, stop and stop_token_ids end the answer."""
    skip_special_tokens: bool | None = None
    """False: special tokens are part of the text."""
    include_stop_str_in_output: bool | None = None
    """The text ends with the stop string, or with the text of the stop token, that ended it."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=TOKENS_MAX)] | None = None
    """Only so many of the prompt's last tokens are kept; -1: as many as fit together with max_tokens."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARACTERS_MAX)] | None = None
    """Cached prefixes are shared with requests of the same salt only, within what a tenant shares at all."""
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None
    """The header x-request-id says the same, and wins."""
    return_token_ids: bool | None = None
    """Add `token_ids` to choices, and `prompt_token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are written `token_id:7`."""
    priority: Annotated[Literal["high", "normal", "low"] | None, pydantic.BeforeValidator(_named)] = None
    """Class of the request: the lowest is shed first when there is not room for all. A tenant may be allowed less than
    it asks for. Of vLLM's numbers 0 is `normal`, what comes before it `high`. (Baton's own, like the two targets.)"""
    ttft_target_s: Target | None = None
    """Most seconds to the first token. A request whose targets cannot be met is refused at once, with `retry-after`."""
    tpot_target_s: Target | None = None
    """Most seconds for each further token, on average."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds that the whole answer may take; then it ends with 504, or an error event. Also as the header
    `x-request-timeout`. (Baton's own.)"""
    timing: bool = False
    """Add `timing`: the parts of the time to the first token, in seconds, and which workers served. (Baton's own.)"""

    # No effect on the answer.
    user: Ignored = None
    safety_identifier: Ignored = None
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    spaces_between_special_tokens: Ignored = None

    # Not supported.
    allowed_token_ids: Annotated[JsonValue, Only()] = None
    bad_words: Annotated[JsonValue, Only([])] = None
    prompt_logprobs: Annotated[JsonValue, Only()] = None
    logits_processors: Annotated[JsonValue, Only([])] = None
    kv_transfer_params: Annotated[JsonValue, Only({})] = None
    vllm_xargs: Annotated[JsonValue, Only({})] = None
    use_beam_search: Annotated[JsonValue, Only(False)] = None
    length_penalty: Annotated[JsonValue, Only(1, 1.0)] = None

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only when stream is true")
        return self

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def shows_usage(self) -> bool:
        """Whether each event has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> common_pb2.SamplingParams:
        """Return the message.

        Args:
            max_tokens: None: up to the context window.
            logprobs: alternatives of each token; None: no logprobs.
        """
        made = common_pb2.SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed % 2**64,
            stop=_listed(self.stop),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logprobs=logprobs,
            min_tokens=self.min_tokens or 0,
        )
        for token_id, bias in (self.logit_bias or {}).items():
            made.logit_bias[int(token_id)] = bias
        if (grammar := self.grammar()) is not None:
            made.grammar.CopyFrom(grammar)
        return made

    def completed(self, made: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
        """Add what is said of text, cache, class and targets to a request, and return it."""
        made.text_options.keep_stop = bool(self.include_stop_str_in_output)
        made.text_options.show_special_tokens = self.skip_special_tokens is False
        made.text_options.prompt_tokens_kept = self.truncate_prompt_tokens or 0
        made.cache_salt = self.cache_salt or ""
        if self.priority is not None:
            made.priority = priority_to_pb(Priority[self.priority.upper()])
        if self.ttft_target_s is not None:
            made.ttft_target_s = self.ttft_target_s
        if self.tpot_target_s is not None:
            made.tpot_target_s = self.tpot_target_s
        return made


TopLogprobs = Annotated[int, Field(ge=0, le=LOGPROBS_MAX)]


def _listed(stop: str | Sequence[str] | None) -> Sequence[str]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else stop
