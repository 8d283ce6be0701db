"""What a request lets the model call, and whether it must."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton_pb.v1 import inference_pb2
from cluster.gateway.parsing.interface import CALLS_MAX, Tool
from common.config_doors import RequestLimitsConfig
from common.errors import InvalidRequestError
from common.grammar import Json, parsed_schema

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools on offer."""

    tools: tuple[Tool, ...]
    must_call: bool
    """The answer is calls and nothing else."""
    only: str | None
    """The one tool that must be called."""
    calls_max: int

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        return tuple(tool for tool in self.tools if self.only in (None, tool.name))


def tool_use_from_pb(message: inference_pb2.GenerateRequest, limits: RequestLimitsConfig) -> ToolUse | None:
    """Return what the model may call; None: nothing.

    Raises:
        InvalidRequestError: too many tools, one that is not what it must be, or a choice without tools.
    """
    choice = message.tool_choice
    mode, only = choice.mode, choice.name if choice.WhichOneof("choice") == "name" else None
    must_call = only is not None or mode == inference_pb2.TOOL_MODE_REQUIRED
    if not message.tools:
        if must_call:
            raise InvalidRequestError("tool_choice must not demand a call where tools has none")
        return None
    if message.WhichOneof("prompt") != "chat":
        raise InvalidRequestError("tools is for chats: only a chat template can offer them")
    if mode == inference_pb2.TOOL_MODE_NONE:
        return None
    tools = tools_from_pb(message.tools, limits)
    if only is not None and only not in {tool.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice must name one of the tools, got {only!r}")
    return ToolUse(tools, must_call, only, 1 if message.single_tool_call or only is not None else CALLS_MAX)


def tools_from_pb(tools: Sequence[inference_pb2.Tool], limits: RequestLimitsConfig) -> tuple[Tool, ...]:
    """Check tools.

    Raises:
        InvalidRequestError: naming the tool, the field and the limit.
    """
    if len(tools) > limits.tools_max:
        raise InvalidRequestError(f"tools must have at most {limits.tools_max} entries, got {len(tools)}")
    names = set[str]()
    for number, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequestError(f"tools[{number}].name must match {_NAME.pattern}, got {tool.name[:80]!r}")
        if tool.name in names:
            raise InvalidRequestError(f"tools[{number}].name is {tool.name!r}, as another one's")
        names.add(tool.name)
    return tuple(
        Tool(tool.name, tool.description, _parameters(f"tools[{number}].parameters", tool.parameters, limits))
        for number, tool in enumerate(tools)
    )


def _parameters(path: str, text: str, limits: RequestLimitsConfig) -> Json:
    if not text:
        return {"type": "object", "properties": {}}
    if len(text.encode()) > limits.schema_bytes_max:
        raise InvalidRequestError(f"{path} must have at most {limits.schema_bytes_max} bytes, got {len(text.encode())}")
    return parsed_schema(text, path, limits.schema_depth_max)


def arguments_schema(tool: Tool) -> Json:
    """Return the schema that a grammar enforces: arguments that the tool does not declare are left out."""
    schema = tool.parameters
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema = {**schema, "type": "object"}
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        schema = {**schema, "additionalProperties": False}
    return schema
