"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and others."""

import json
import secrets
from collections.abc import Callable, Sequence

from cluster.gateway.parsing.calls import CallsReader
from cluster.gateway.parsing.interface import NewId, Parsed, Tool, ToolFormat
from cluster.gateway.parsing.until import Until
from common.grammar import Form, quoted

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def new_id() -> str:
    """Return an id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class HermesFormat(ToolFormat):
    """See the module."""

    markers = (_OPENING, _CLOSING)

    def parser(self, names: frozenset[str]) -> "HermesParser":  # noqa: ARG002  # the tags say enough
        """See ToolFormat."""
        return HermesParser(new_id)

    def form(self, tools: Sequence[Tool], calls_max: int, lark_of: Callable[[str], str]) -> Form:
        """See ToolFormat."""
        opening, closing = lark_of(_OPENING), lark_of(_CLOSING)
        calls = [
            f"{opening} {quoted(_head(tool.name))} @args{number} {quoted('}' + chr(10))} {closing}"
            for number, tool in enumerate(tools)
        ]
        more = f' ("\\n" call){{0,{calls_max - 1}}}' if calls_max > 1 else ""
        lark = f"start: call{more}\ncall: {' | '.join(calls)}\n"
        return Form(lark, {f"args{number}": {"json_schema": tool.parameters} for number, tool in enumerate(tools)})

    def call_text(self, name: str, arguments: str) -> str:
        """See ToolFormat."""
        return f"{_OPENING}{_head(name)}{arguments}}}\n{_CLOSING}"


def _head(name: str) -> str:
    return f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


class HermesParser:
    """Reads one answer.

        TEXT ──<tool_call>──► CALLS ──end of the JSON──► CLOSING ──</tool_call>, or its absence──► TEXT

    Text beside the calls is the answer's, without the white space that sets the calls apart.
    """

    def __init__(self, make_id: NewId) -> None:
        self._new_id = make_id
        self._num_calls = 0
        self._text: Until | None = Until(_OPENING)
        self._calls: CallsReader | None = None
        self._closing = ""

    def push(self, text: str) -> Parsed:
        """See TextParser."""
        parsed = Parsed()
        while text:
            if self._calls is not None:
                text, part = self._read(self._calls, text)
            elif self._text is not None:
                text, part = self._say(self._text, text)
            else:
                text, part = self._close(self._closing + text), Parsed()
            parsed += part
        return parsed

    def finish(self) -> Parsed:
        """See TextParser."""
        if self._calls is not None:
            held = self._calls.finish()
            return Parsed() if held is None else Parsed(_OPENING + held)
        return Parsed("" if self._text is None else self._text.finish())

    def _say(self, until: Until, text: str) -> tuple[str, Parsed]:
        passed = until.push(text)
        if until.rest is None:
            return "", Parsed(passed)
        self._text, self._calls = None, CallsReader(self._num_calls, self._new_id)
        return until.rest, Parsed(passed)

    def _read(self, calls: CallsReader, text: str) -> tuple[str, Parsed]:
        rest = calls.push(text)
        parsed = Parsed(calls=calls.pieces())
        if calls.is_over:
            self._num_calls, self._calls = calls.next_index, None
            if calls.refused is not None:
                self._text = Until(_OPENING)
                parsed += Parsed(_OPENING + calls.refused)
        return rest, parsed

    def _close(self, text: str) -> str:
        """Drop the closing tag; return what follows, or hold what may become one."""
        stripped = text.lstrip()
        if len(stripped) < len(_CLOSING) and _CLOSING.startswith(stripped):
            self._closing = text
            return ""
        self._closing, self._text = "", Until(_OPENING, drops_space=True)
        return stripped.removeprefix(_CLOSING)
