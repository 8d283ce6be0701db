"""A ModelInferRequest -> the gateway's own request. Tensors and parameters are those of Triton's LLM backends.

`text_input` is the prompt. Everything else may come as a tensor, as a parameter of the request, or in the JSON object
`sampling_parameters` (vLLM's backend, which takes numbers as text too); the names are vLLM's and TensorRT-LLM's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton_pb.kserve import inference_pb2 as kserve_pb2
from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.kserve.tensors import Value, read_inputs
from common.errors import InvalidRequestError
from common.grammar import parsed_object

MAX_TOKENS_DEFAULT = 16
"""vLLM's, where a request says nothing."""
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
OUTPUTS = (TEXT_OUTPUT, "finish_reason", "num_input_tokens", "num_output_tokens")


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request wants."""

    message: inference_pb2.GenerateRequest
    outputs: frozenset[str]
    """Of OUTPUTS."""
    streams: bool
    """Several answers, each with what is new."""
    repeats_prompt: bool
    """The text begins with the prompt."""
    is_raw: bool
    """Answer with raw bytes, as the client asked."""
    timeout_s: float | None
    ends_empty: bool
    """End a stream with an answer that has no tensors."""


def read_request(request: kserve_pb2.ModelInferRequest, may_stream: bool) -> Asked:
    """Read and check a request, as far as names and types go.

    Args:
        request: from the client.
        may_stream: whether there may be several answers.

    Raises:
        InvalidRequestError: a tensor, parameter or value that means nothing here.
    """
    given = _given(request)
    text = given.pop(TEXT_INPUT, None)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{TEXT_INPUT} is missing: a tensor of datatype BYTES and one value")
    streams = _flag(given, "stream", False)
    if streams and not may_stream:
        raise InvalidRequestError("stream must be false in ModelInfer: use ModelStreamInfer")
    excludes = _flag(given, "exclude_input_in_output", streams)
    if streams and not excludes:
        raise InvalidRequestError("exclude_input_in_output must be true in a stream")
    wanted = {name for name in OUTPUTS[1:] if _flag(given, f"return_{name}", False)}
    timeout = given.pop("timeout", None)
    ends_empty = _flag(given, "triton_enable_empty_final_response", False)
    for ignored in ("priority", "sequence_id", "sequence_start", "sequence_end"):
        given.pop(ignored, None)
    message = inference_pb2.GenerateRequest(model=request.model_name, text=text)
    message.sampling.max_tokens = MAX_TOKENS_DEFAULT
    for name, value in given.items():
        _set(message, name, value)
    return Asked(
        message,
        _outputs(request, wanted),
        streams,
        not excludes,
        bool(request.raw_input_contents),
        None if timeout is None else max(1, _integer("timeout", timeout)) / 1e6,
        ends_empty,
    )


def _given(request: kserve_pb2.ModelInferRequest) -> dict[str, Any]:
    """Return everything by name; a name that comes in two places is a mistake."""
    tensors = read_inputs(request)
    json_text = tensors.pop("sampling_parameters", None)
    parts: list[Mapping[str, Any]] = [
        {name: values if name in _LISTS else _single(name, values) for name, values in tensors.items()},
        {name: _parameter(value) for name, value in request.parameters.items()},
        {} if json_text is None else _sampling_parameters(_single("sampling_parameters", json_text)),
    ]
    given: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            name = _ALIASES.get(name, name)
            if name in given:
                raise InvalidRequestError(f"{name} is given twice")
            given[name] = value
    return given


def _single(name: str, values: list[Value]) -> Value:
    if len(values) != 1:
        raise InvalidRequestError(f"{name} must have one value, got {len(values)}")
    return values[0]


def _parameter(value: kserve_pb2.InferParameter) -> Any:
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def _sampling_parameters(text: Value) -> Mapping[str, Any]:
    if not isinstance(text, str):
        raise InvalidRequestError("sampling_parameters must be a JSON object, as text")
    return parsed_object(text, "sampling_parameters")


def _flag(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.pop(name, None)
    return default if value is None else _boolean(name, value)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidRequestError(f"{name} must be true or false")


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    except ValueError:
        pass
    raise InvalidRequestError(f"{name} must be an integer")


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise InvalidRequestError(f"{name} must be a number")


def _texts(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise InvalidRequestError(f"{name} must be text, or a list of texts")
    return values


def _integers(name: str, value: Any) -> list[int]:
    return [_integer(name, one) for one in (value if isinstance(value, list) else [value])]


_SAMPLING: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": lambda name, value: max(0, _integer(name, value)),  # vLLM's -1: all
    "min_p": _number,
    "seed": lambda name, value: _integer(name, value) % 2**64,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "ignore_eos": _boolean,
    "stop": _texts,
    "stop_token_ids": _integers,
}
_TEXT: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "include_stop_str_in_output": lambda name, value: {"keep_stop": _boolean(name, value)},
    "skip_special_tokens": lambda name, value: {"show_special_tokens": not _boolean(name, value)},
    "truncate_prompt_tokens": lambda name, value: {"prompt_tokens_kept": _integer(name, value)},
}
"""What vLLM has among its sampling parameters and we among the options of the text."""
_LISTS = frozenset({"stop", "stop_words", "stop_token_ids"})
_ALIASES = {"stop_words": "stop", "random_seed": "seed", "min_length": "min_tokens", "runtime_top_k": "top_k"}
_ALIASES |= {"runtime_top_p": "top_p"}


def _set(message: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if value is None:
        return
    try:
        if name == "n":
            message.n = _integer(name, value)
        elif name in _SAMPLING:
            read = _SAMPLING[name](name, value)
            message.sampling.MergeFrom(common_pb2.SamplingParams(**{name: read}))
        elif name in _TEXT:
            message.text_options.MergeFrom(inference_pb2.TextOptions(**_TEXT[name](name, value)))
        else:
            raise InvalidRequestError(f"{name[:64]} is nothing that this model takes")
    except ValueError as error:  # what the message has no room for
        raise InvalidRequestError(f"{name} is out of range") from error


def _outputs(request: kserve_pb2.ModelInferRequest, wanted: set[str]) -> frozenset[str]:
    named = set()
    for number, output in enumerate(request.outputs):
        if output.name not in OUTPUTS:
            raise InvalidRequestError(f"outputs[{number}].name must be one of {', '.join(OUTPUTS)}")
        if "shared_memory_region" in output.parameters:
            raise InvalidRequestError(f"outputs[{number}].parameters has shared_memory_region: there is none here")
        named.add(output.name)
    return frozenset(named | wanted if named else wanted | {TEXT_OUTPUT})
