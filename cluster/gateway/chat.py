"""A conversation: what its messages must be, and how they are handed to the model's template."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_pb.v1 import inference_pb2
from cluster.gateway.limits import Limits
from cluster.gateway.parsing.interface import Tool
from cluster.gateway.tool_use import tools_from_pb
from common.errors import InvalidRequestError
from common.grammar import parsed_object, parsed_schema

Message = Mapping[str, Any]
"""As chat templates know them: role, content, and what else the message has."""
_TOOL_CHARACTERS = 500
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Rendered by the model's template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_characters(self) -> int:
        """Roughly how much there is to render."""
        return sum(len(message["content"]) for message in self.messages) + _TOOL_CHARACTERS * len(self.tools)


def check_chat(
    chat: inference_pb2.ChatMessages,
    tools: Sequence[inference_pb2.Tool],
    template_arguments: str,
    options: inference_pb2.TextOptions,
    limits: Limits,
) -> ChatPrompt:
    """Return a prompt of chat messages.

    Args:
        chat: the messages.
        tools: on offer.
        template_arguments: further variables of the template, as JSON text; empty: none.
        options: how the prompt is to end.
        limits: see Limits.

    Raises:
        InvalidRequestError: none, too many or too long messages, one without a role, nothing said in any of them, or a
            call, tool or argument that is not what it must be.
    """
    if not chat.messages:
        raise InvalidRequestError("prompt is empty: chat has no messages")
    most = limits.request.messages_max
    if len(chat.messages) > most:
        raise InvalidRequestError(f"messages must have at most {most} entries, got {len(chat.messages)}")
    limits.check_length(sum(_lengths(chat.messages)) + sum(len(tool.parameters) for tool in tools))
    messages = tuple(_message(number, message) for number, message in enumerate(chat.messages))
    if not any(message["content"] or "tool_calls" in message for message in messages):
        raise InvalidRequestError("prompt is empty: no chat message has any content")
    return ChatPrompt(
        messages,
        tools_from_pb(tools, limits.request),
        _arguments(template_arguments, limits),
        not options.no_generation_prompt,
        options.continue_final_message,
    )


def _lengths(messages: Iterable[inference_pb2.ChatMessage]) -> Iterator[int]:
    for message in messages:
        yield len(message.content) + len(message.reasoning)
        yield sum(len(part.text) for part in message.parts)
        yield sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


def _message(number: int, message: inference_pb2.ChatMessage) -> Message:
    if not message.role:
        raise InvalidRequestError(f"messages[{number}].role is missing")
    if message.content and message.parts:
        raise InvalidRequestError(f"messages[{number}].parts must not be given together with content")
    made: dict[str, Any] = {"role": message.role, "content": message.content or _joined(number, message)}
    if message.tool_calls:
        made["tool_calls"] = [_call(f"messages[{number}].tool_calls[{i}]", c) for i, c in enumerate(message.tool_calls)]
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            made[name] = value
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    return made


def _joined(number: int, message: inference_pb2.ChatMessage) -> str:
    for index, part in enumerate(message.parts):
        if part.WhichOneof("part") != "text":
            raise InvalidRequestError(f"messages[{number}].parts[{index}] must be text")
    return "\n".join(part.text for part in message.parts)


def _call(path: str, call: inference_pb2.ToolCall) -> dict[str, Any]:
    if not call.name:
        raise InvalidRequestError(f"{path}.name is missing")
    arguments = parsed_object(call.arguments or "{}", f"{path}.arguments")
    # An object, not text: so templates written for transformers have it.
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _arguments(text: str, limits: Limits) -> Mapping[str, Any]:
    if not text:
        return {}
    if len(text) > limits.request.schema_bytes_max:
        raise InvalidRequestError(
            f"template_arguments must have at most {limits.request.schema_bytes_max} characters, got {len(text)}"
        )
    arguments = parsed_schema(text, "template_arguments", limits.request.schema_depth_max)
    if reserved := _RESERVED & arguments.keys():
        raise InvalidRequestError(f"template_arguments.{min(reserved)} is set by other fields")
    return arguments
