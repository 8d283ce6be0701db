"""`{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`, several with `; ` between: Llama 3."""

import json
from collections.abc import Callable, Sequence

from cluster.gateway.parsing.calls import CallsReader
from cluster.gateway.parsing.hermes import new_id
from cluster.gateway.parsing.interface import NewId, Parsed, Tool, ToolFormat
from cluster.gateway.parsing.json_call import CallReader
from common.grammar import Form, quoted

_TAG = "<|python_tag|>"
_KEYS = frozenset({"name", "type", "function", "parameters", "arguments", "id"})
"""What a call may begin with."""


class Llama3Format(ToolFormat):
    """See the module."""

    markers = (_TAG,)

    def parser(self, names: frozenset[str]) -> "Llama3Parser":
        """See ToolFormat."""
        return Llama3Parser(names, new_id)

    def form(self, tools: Sequence[Tool], calls_max: int, lark_of: Callable[[str], str]) -> Form:  # noqa: ARG002
        """See ToolFormat."""
        calls = [f'{quoted(_head(tool.name))} @args{number} "}}"' for number, tool in enumerate(tools)]
        more = f' ("; " call){{0,{calls_max - 1}}}' if calls_max > 1 else ""
        lark = f"start: call{more}\ncall: {' | '.join(calls)}\n"
        return Form(lark, {f"args{number}": {"json_schema": tool.parameters} for number, tool in enumerate(tools)})

    def call_text(self, name: str, arguments: str) -> str:
        """See ToolFormat."""
        return f"{_head(name)}{arguments}}}"


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '


class Llama3Parser:
    """Reads one answer, which is calls from its beginning or text to its end.

        START ─{─► CALLS ─ ; ─► CALLS ─── anything else ──► TEXT
          └──── anything else, or an object that calls none of the tools on offer ──► TEXT

    Without a tag only the tool's name tells a call from an answer in JSON.
    """

    def __init__(self, names: frozenset[str], make_id: NewId) -> None:
        self._names = names
        self._new_id = make_id
        self._num_calls = 0
        self._held: str | None = ""
        """At the beginning and between calls: what may become a tag; None: in a call or in text."""
        self._calls: CallsReader | None = None

    def push(self, text: str) -> Parsed:
        """See TextParser."""
        parsed = Parsed()
        while text:
            if self._calls is not None:
                text, part = self._read(self._calls, text)
            elif self._held is not None:
                text, part = self._begin(self._held + text), Parsed()
            else:
                return parsed + Parsed(text)
            parsed += part
        return parsed

    def finish(self) -> Parsed:
        """See TextParser."""
        if self._calls is not None:
            return Parsed(self._calls.finish() or "")
        return Parsed("" if self._num_calls else self._held or "")

    def _begin(self, text: str) -> str:
        """Find out what begins; return the text to go on with."""
        separators = " \t\r\n;" if self._num_calls else " \t\r\n"
        stripped = text.lstrip(separators)
        if len(stripped) < len(_TAG) and _TAG.startswith(stripped):
            self._held = text
            return ""
        self._held = None
        body = stripped.removeprefix(_TAG).lstrip()
        if stripped.startswith(_TAG) and not body:
            self._held = text
            return ""
        if body.startswith("{"):
            self._calls = CallsReader(self._num_calls, self._new_id, self._is_wanted)
            return body
        return stripped if self._num_calls else text

    def _read(self, calls: CallsReader, text: str) -> tuple[str, Parsed]:
        rest = calls.push(text)
        parsed = Parsed(calls=calls.pieces())
        if calls.is_over:
            self._num_calls, self._calls = calls.next_index, None
            if calls.refused is None:
                self._held = ""
            else:
                parsed += Parsed(calls.refused)
        return rest, parsed

    def _is_wanted(self, call: CallReader) -> bool:
        return call.key in _KEYS and (call.name is None or call.name in self._names)
