"""What an answer must look like -> the constraint that workers obey; made on the tokenizer's thread."""

from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

from cluster.gateway.parsing.formats import Formats, Thinking
from cluster.gateway.request import Request
from cluster.gateway.tokenizing import Tokenizing
from cluster.gateway.tool_use import ToolUse, arguments_schema
from common.config_doors import RequestLimitsConfig
from common.errors import InvalidRequestError
from common.grammar import Form, constraint_of, either, form_of, json_form

_KEPT_CHARACTERS_MAX = 16 * 1024 * 1024
_TOOLS_PER_SCHEMA = 4
"""The schemas of all tools that may have to be called may together be so many times as long as one schema."""


class _Key(NamedTuple):
    """All that a constraint follows from."""

    grammar: bytes
    tools: str
    thinking: Thinking


class Constraints:
    """Makes constraints and keeps the last ones. Owned by the gateway's loop."""

    def __init__(self, tokenizing: Tokenizing, formats: Formats, limits: RequestLimitsConfig) -> None:
        self._tokenizing = tokenizing
        self._formats = formats
        self._limits = limits
        self._kept: OrderedDict[_Key, str] = OrderedDict()
        self._kept_characters = 0

    async def of(self, request: Request, thinking: Thinking) -> str:
        """Return the constraint of a request's grammar and of the calls that it demands; empty if anything may come.

        Raises:
            InvalidRequestError: naming the part that cannot be obeyed.
        """
        must_call = request.tools is not None and request.tools.must_call
        if request.grammar is None and not must_call:
            return ""
        grammar = b"" if request.grammar is None else request.grammar.SerializeToString(deterministic=True)
        key = _Key(grammar, repr(request.tools), thinking)
        constraint = self._kept.get(key)
        if constraint is None:
            constraint = await self._tokenizing.on_thread(lambda: self._make(request, thinking))
            self._keep(key, constraint)
        else:
            self._kept.move_to_end(key)
        return constraint

    def _keep(self, key: _Key, constraint: str) -> None:
        if key not in self._kept:  # else another request with the same brought it meanwhile
            self._kept[key] = constraint
            self._kept_characters += _size(key, constraint)
        while self._kept_characters > _KEPT_CHARACTERS_MAX:
            self._kept_characters -= _size(*self._kept.popitem(last=False))

    def _make(self, request: Request, thinking: Thinking) -> str:
        return constraint_of(self._formats.with_thinking(self._answer(request), thinking))

    def _answer(self, request: Request) -> Form:
        grammar, tools = request.grammar, request.tools
        if grammar is None or (tools is not None and tools.must_call):
            assert tools is not None
            return self._calls(tools)
        form = form_of(grammar, self._limits.schema_bytes_max, self._limits.schema_depth_max)
        # The model may still decide to call a tool instead.
        return form if tools is None else either(form, self._calls(tools))

    def _calls(self, tools: ToolUse) -> Form:
        numbers = {tool.name: number for number, tool in enumerate(tools.tools)}
        most, made, size = self._limits.schema_bytes_max * _TOOLS_PER_SCHEMA, [], 0
        for tool in tools.callable_tools:
            form = json_form(arguments_schema(tool), f"tools[{numbers[tool.name]}].parameters")
            made.append(replace(tool, parameters=form.nested["json"]["json_schema"]))
            size += len(constraint_of(form))
            if size > most:
                raise InvalidRequestError(f"tools must have at most {most} bytes together where one must be called")
        return self._formats.tools.form(made, tools.calls_max, self._formats.lark_of)


def _size(key: _Key, constraint: str) -> int:
    return len(key.grammar) + len(key.tools) + len(constraint)
