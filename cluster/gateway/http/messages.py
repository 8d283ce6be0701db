"""A conversation's messages and the tools that it offers, as OpenAI writes them."""

import json
from typing import Annotated, Literal

import pydantic
from pydantic import Field, JsonValue

from baton_pb.v1 import inference_pb2
from cluster.gateway.http.base import Fields, Ignored, Only
from cluster.gateway.request import MESSAGES_MAX

_PARTS_MAX = 1024
_CALLS_MAX = 128
TOOLS_MAX = 1024
"""The most that gateway.request.tools_max may allow."""
_MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}


class TextPart(Fields):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None


class CalledFunction(Fields):
    """What was called."""

    name: str
    arguments: str
    """A JSON object, as text."""
    parsed_arguments: Ignored = None


class MessageCall(Fields):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


class Message(Fields):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """`developer` is read as `system`."""
    content: str | Annotated[list[TextPart], Field(max_length=_PARTS_MAX, fail_fast=True)] | None = None
    """Text, or pieces of text that are joined by line ends."""
    name: str | None = None
    """For templates that know it."""
    tool_calls: Annotated[list[MessageCall], Field(max_length=_CALLS_MAX, fail_fast=True)] | None = None
    """The assistant's."""
    tool_call_id: str | None = None
    """With role `tool`: which call this is the result of."""
    reasoning_content: str | None = None
    """For templates that know it."""
    reasoning: str | None = None
    """Another name of reasoning_content."""
    refusal: Annotated[JsonValue, Only()] = None
    audio: Annotated[JsonValue, Only()] = None
    function_call: Annotated[JsonValue, Only()] = None
    annotations: Ignored = None
    parsed: Ignored = None

    def to_pb(self) -> inference_pb2.ChatMessage:
        """Return the message as the gateway's core takes it."""
        content = self.content or ""
        made = inference_pb2.ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=content if isinstance(content, str) else "\n".join(part.text for part in content),
            name=self.name or "",
            tool_call_id=self.tool_call_id or "",
            reasoning=self.reasoning_content or self.reasoning or "",
        )
        for call in self.tool_calls or ():
            made.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
        return made


class Function(Fields):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON schema of an object."""
    strict: bool | None = None
    """A call that is demanded obeys the schema in any case; one that the model decides on is read as it is written."""


class ToolField(Fields):
    """Something that the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Fields):
    """Its name."""

    name: str


class ChosenTool(Fields):
    """A tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


Messages = Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]


class ChatFields(Fields):
    """What is rendered by the chat template, besides the messages."""

    tools: Annotated[list[ToolField], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """`required`, or a function's name: the answer is calls, by grammar. `auto` unless given."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Further variables of the chat template, e.g. enable_thinking."""
    reasoning_effort: Annotated[str, Field(pattern=r"^[a-z]{1,16}$")] | None = None
    """A variable of the chat template; one that does not know it answers as without it."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends with the last message, and not with the beginning of the assistant's turn."""
    continue_final_message: bool | None = None
    """The answer continues the last message's text."""
    chat_template: Annotated[JsonValue, Only()] = None

    @pydantic.model_validator(mode="after")
    def _check_tools(self) -> "ChatFields":
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice is allowed only together with tools")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message is not allowed together with add_generation_prompt")
        return self

    def set_text_options(self, options: inference_pb2.TextOptions) -> None:
        """Say how the prompt is to end."""
        options.no_generation_prompt = self.add_generation_prompt is False
        options.continue_final_message = bool(self.continue_final_message)

    def tools_to_pb(self) -> list[inference_pb2.Tool]:
        """Return the tools on offer as the gateway's core takes them."""
        return [
            inference_pb2.Tool(
                name=tool.function.name,
                description=tool.function.description or "",
                parameters=_text(tool.function.parameters),
            )
            for tool in self.tools or ()
        ]

    def choice_to_pb(self) -> inference_pb2.ToolChoice | None:
        """Return which of them must be called."""
        match self.tool_choice:
            case ChosenTool(function=function):
                return inference_pb2.ToolChoice(name=function.name)
            case str(mode):
                return inference_pb2.ToolChoice(mode=_MODES[mode])
            case None:
                return None

    def template_arguments(self) -> str:
        """Return the template's further variables as text."""
        given = self.chat_template_kwargs or {}
        if self.reasoning_effort is not None:
            given = {"reasoning_effort": self.reasoning_effort, **given}
        return _text(given or None)


def _text(value: dict[str, JsonValue] | None) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)
