"""One internal request, whatever door it came through, and every check that can be made before a worker is asked."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.chat import ChatPrompt, check_chat
from cluster.gateway.limits import Limits
from cluster.gateway.tool_use import ToolUse, tool_use_from_pb
from cluster.service_level import ORDINARY, ServiceLevel, level_from_pb
from common.errors import InvalidRequestError, NotFoundError

# The workers' own limits (engine/sampling_params.py), known here so that a bad request ends at the door.
LOGPROBS_MAX = 20
IDS_MAX = 1024
PENALTY_MAX = 100.0
BIAS_MAX = 1000.0
TEMPERATURE_MAX = 100.0
STOP_STRINGS_MAX = 16
"""The most that gateway.request.stop_strings_max may allow."""
STOP_CHARACTERS_MAX = 256
"""Text may be held back so long, and each piece is searched for each of them."""
REQUEST_ID_CHARACTERS_MAX = 128
CACHE_SALT_CHARACTERS_MAX = 256
MESSAGES_MAX = 4096
"""The most that gateway.request.messages_max may allow."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Completed as it is."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Completed as it is, and not tokenized either."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What becomes of the prompt's tokens and the answer's text, besides what is asked for."""

    prompt_tokens_kept: int = 0
    """Of its end; 0: all; -1: what fits."""
    keep_stop: bool = False
    """The text ends with what ended it."""
    show_special_tokens: bool = False
    cache_salt: str = ""
    """Of the client's own, within its tenant's."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose every field is within its limits; whether it fits the window shows when it is tokenized."""

    request_id: str
    prompt: Prompt
    sampling: common_pb2.SamplingParams
    """For the workers: with a seed, without stop strings and grammar. Not changed by anybody."""
    stop: tuple[str, ...]
    grammar: common_pb2.Grammar | None = None
    """What the output must look like."""
    tools: ToolUse | None = None
    """What the model may call; None: nothing."""
    level: ServiceLevel = ORDINARY
    text: TextOptions = field(default_factory=TextOptions)
    tenant: str = ""
    """Whose it is; by whom that is known, the message does not say."""


def request_from_pb(
    message: inference_pb2.GenerateRequest, limits: Limits, request_id: str, draw_seed: Callable[[], int]
) -> Request:
    """Check a message and return what it asks for.

    Args:
        message: from the client.
        limits: see Limits.
        request_id: what it is called: by the message's own id, if it has one, and by which choice it is.
        draw_seed: called when the message has no seed.

    Raises:
        InvalidRequestError: naming the field, its limit and the value.
        NotFoundError: another model.
    """
    check_model(message.model, limits)
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(message.sampling)
    _check_sampling(sampling, limits)
    stop = _check_stop(tuple(sampling.stop), limits.request.stop_strings_max)
    grammar = message.sampling.grammar if sampling.HasField("grammar") else None
    sampling.ClearField("stop")
    sampling.ClearField("grammar")
    if not sampling.HasField("seed"):
        sampling.seed = draw_seed()
    tools = tool_use_from_pb(message, limits.request)
    if sampling.ignore_eos and (grammar is not None or (tools is not None and tools.must_call)):
        raise InvalidRequestError("ignore_eos must not be set with a grammar, which ends the output by itself")
    _check_id(message.request_id)
    return Request(
        request_id,
        _prompt_from_pb(message, limits),
        sampling,
        stop,
        grammar,
        tools,
        level_from_pb(message),
        _text_options(message),
    )


def _text_options(message: inference_pb2.GenerateRequest) -> TextOptions:
    options = message.text_options
    if options.prompt_tokens_kept < -1:
        raise InvalidRequestError(f"prompt_tokens_kept must be at least -1, got {options.prompt_tokens_kept}")
    if len(message.cache_salt) > CACHE_SALT_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"cache_salt must have at most {CACHE_SALT_CHARACTERS_MAX} characters, got {len(message.cache_salt)}"
        )
    return TextOptions(options.prompt_tokens_kept, options.keep_stop, options.show_special_tokens, message.cache_salt)


def check_model(model: str, limits: Limits) -> None:
    """Accept the served model's name, or none.

    Raises:
        NotFoundError: any other name.
    """
    if model and model != limits.model_id:
        raise NotFoundError(f"model {model!r} is not served here, only {limits.model_id!r}")


def check_text(text: str, limits: Limits, add_special_tokens: bool = True) -> TextPrompt:
    """Return a prompt of plain text.

    Raises:
        InvalidRequestError: empty, or too long for any tokenizer.
    """
    if not text:
        raise InvalidRequestError("prompt is empty")
    limits.check_length(len(text))
    return TextPrompt(text, add_special_tokens)


def check_told(name: str, token_ids: Collection[int], limits: Limits) -> None:
    """Accept ids whose text is asked for: as many as the window has, for streams wait while they are turned into text.

    Raises:
        InvalidRequestError: too many, or one that is not in the vocabulary.
    """
    if len(token_ids) > limits.context_tokens:
        raise InvalidRequestError(
            f"{name} must be at most {limits.context_tokens}, as many as the context window has, got {len(token_ids)}"
        )
    _check_vocabulary(name, token_ids, limits)


def check_window(num_prompt_tokens: int, max_tokens: int | None, limits: Limits) -> int:
    """Return the most tokens that may be generated after a prompt of this length.

    Args:
        num_prompt_tokens: of the tokenized prompt.
        max_tokens: what the client asks for; None: whatever is left of the window.
        limits: see Limits.

    Raises:
        InvalidRequestError: the prompt is empty, or does not fit, or not together with max_tokens.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt is empty: it has no tokens")
    _check_num_tokens(num_prompt_tokens, limits)
    room = limits.context_tokens - num_prompt_tokens
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens must be at most {room} with a prompt of {num_prompt_tokens} tokens in a context window of "
            f"{limits.context_tokens}, got {max_tokens}"
        )
    return max_tokens


def _prompt_from_pb(message: inference_pb2.GenerateRequest, limits: Limits) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return check_text(message.text, limits, not message.text_options.no_special_tokens)
        case "token_ids":
            return _check_token_ids(_kept(message, limits), limits)
        case "chat":
            is_offered = message.tool_choice.mode != inference_pb2.TOOL_MODE_NONE
            tools = message.tools if is_offered else []
            return check_chat(message.chat, tools, message.template_arguments, message.text_options, limits)
        case _:  # a batch comes as its prompts
            raise InvalidRequestError("prompt is missing: set text, token_ids or chat")


def num_kept(prompt_tokens_kept: int, max_tokens: int | None, limits: Limits) -> int | None:
    """Return how many of a prompt's last tokens are kept; None: all. For the arguments see TextOptions."""
    if prompt_tokens_kept >= 0:
        return prompt_tokens_kept or None
    return max(1, min(limits.prompt_tokens_max, limits.context_tokens - (max_tokens or 1)))


def _kept(message: inference_pb2.GenerateRequest, limits: Limits) -> Sequence[int]:
    most = num_kept(message.text_options.prompt_tokens_kept, message.sampling.max_tokens, limits)
    return message.token_ids.ids if most is None else message.token_ids.ids[-most:]


def _check_num_tokens(num_tokens: int, limits: Limits) -> None:
    if num_tokens > limits.prompt_tokens_max:
        raise InvalidRequestError(
            f"prompt has {num_tokens} tokens, at most {limits.prompt_tokens_max} are possible with a context window of "
            f"{limits.context_tokens}"
        )


def _check_token_ids(ids: Sequence[int], limits: Limits) -> TokenPrompt:
    if not ids:
        raise InvalidRequestError("prompt is empty: token_ids has no ids")
    # Before anything looks at each of them: a message has room for tens of millions, which would hold up every stream.
    _check_num_tokens(len(ids), limits)
    token_ids = tuple(ids[:])  # a slice is taken out at once, the field's items one by one: a third of the time
    _check_vocabulary("token_ids", token_ids, limits)
    return TokenPrompt(token_ids)


def _check_vocabulary(name: str, token_ids: Collection[int], limits: Limits) -> None:
    if token_ids and max(token_ids) >= limits.vocab_tokens:
        raise InvalidRequestError(f"{name} must be below {limits.vocab_tokens}, got {max(token_ids)}")


def _check_id(request_id: str) -> None:
    if len(request_id) > REQUEST_ID_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"request_id must have at most {REQUEST_ID_CHARACTERS_MAX} characters, got {len(request_id)}"
        )
    if request_id and not (request_id.isascii() and request_id.isprintable() and " " not in request_id):
        raise InvalidRequestError(f"request_id must be printable ASCII without spaces, got {request_id!r}")


def _check_stop(stop: tuple[str, ...], most: int) -> tuple[str, ...]:
    if len(stop) > most:
        raise InvalidRequestError(f"stop must have at most {most} strings, got {len(stop)}")
    for number, text in enumerate(stop):
        if not 0 < len(text) <= STOP_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"stop[{number}] must have 1 to {STOP_CHARACTERS_MAX} characters, got {len(text)}"
            )
    return stop


def _check_sampling(sampling: common_pb2.SamplingParams, limits: Limits) -> None:
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens == 0:
            raise InvalidRequestError("max_tokens must be at least 1, got 0")
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens, {sampling.max_tokens}, got {sampling.min_tokens}"
            )
    if sampling.constraint:
        raise InvalidRequestError("constraint is made by the gateway: set grammar")
    if sampling.min_tokens >= limits.context_tokens:
        raise InvalidRequestError(
            f"min_tokens must be below the context window, {limits.context_tokens}, got {sampling.min_tokens}"
        )
    if sampling.HasField("logprobs") and sampling.logprobs > LOGPROBS_MAX:
        raise InvalidRequestError(f"logprobs must be at most {LOGPROBS_MAX}, got {sampling.logprobs}")
    if sampling.HasField("temperature"):
        _check_range("temperature", sampling.temperature, 0.0, TEMPERATURE_MAX)
    if sampling.HasField("top_p"):
        _check_range("top_p", sampling.top_p, 0.0, 1.0, is_open=True)
    if sampling.HasField("repetition_penalty"):
        _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, PENALTY_MAX, is_open=True)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("presence_penalty", sampling.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
    _check_range("frequency_penalty", sampling.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits, IDS_MAX)
    _check_ids("logit_bias", sampling.logit_bias, limits, limits.request.logit_bias_max)
    for token_id, bias in sampling.logit_bias.items():
        _check_range(f"logit_bias[{token_id}]", bias, -BIAS_MAX, BIAS_MAX)


def _check_range(name: str, value: float, low: float, high: float, is_open: bool = False) -> None:
    # NaN compares false with everything, so it is refused here as well.
    if not (low < value if is_open else low <= value) or not value <= high or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be in {'(' if is_open else '['}{low:g}, {high:g}], got {value}")


def _check_ids(name: str, token_ids: Collection[int], limits: Limits, most: int) -> None:
    if len(token_ids) > most:
        raise InvalidRequestError(f"{name} must have at most {most} entries, got {len(token_ids)}")
    _check_vocabulary(name, token_ids, limits)
