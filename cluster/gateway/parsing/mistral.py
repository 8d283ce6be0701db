"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call: Mistral."""

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence

from cluster.gateway.parsing.calls import CallsReader
from cluster.gateway.parsing.interface import CallPiece, NewId, Parsed, Tool, ToolFormat
from cluster.gateway.parsing.json_call import JsonSpan
from cluster.gateway.parsing.until import Until
from common.grammar import Form, quoted

_TAG, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ALPHABET = string.ascii_letters + string.digits


def new_id() -> str:
    """Return an id as Mistral's templates demand it: nine letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class MistralFormat(ToolFormat):
    """See the module."""

    markers = (_TAG, _ARGS, _CALL_ID)

    def parser(self, names: frozenset[str]) -> "MistralParser":  # noqa: ARG002  # the tag says enough
        """See ToolFormat."""
        return MistralParser(new_id)

    def form(self, tools: Sequence[Tool], calls_max: int, lark_of: Callable[[str], str]) -> Form:
        """See ToolFormat."""
        calls = [f'{quoted(_head(tool.name))} @args{number} "}}"' for number, tool in enumerate(tools)]
        more = f' (", " call){{0,{calls_max - 1}}}' if calls_max > 1 else ""
        lark = f'start: {lark_of(_TAG)} "[" call{more} "]"\ncall: {" | ".join(calls)}\n'
        return Form(lark, {f"args{number}": {"json_schema": tool.parameters} for number, tool in enumerate(tools)})

    def call_text(self, name: str, arguments: str) -> str:
        """See ToolFormat."""
        return f"{_TAG}[{_head(name)}{arguments}}}]"


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


class MistralParser:
    """Reads one answer.

    TEXT ──[TOOL_CALLS]──► BEGIN ─[ or {─► CALLS ──end──► TEXT
                             └─name─► ARGUMENTS ──end──► TEXT
    """

    def __init__(self, make_id: NewId) -> None:
        self._new_id = make_id
        self._num_calls = 0
        self._text: Until | None = Until(_TAG)
        self._begun = ""
        """What stands between the tag and the first bracket."""
        self._calls: CallsReader | None = None
        self._arguments: JsonSpan | None = None

    def push(self, text: str) -> Parsed:
        """See TextParser."""
        parsed = Parsed()
        while text:
            if self._calls is not None:
                text, part = self._read(self._calls, text)
            elif self._arguments is not None:
                text, part = self._read_arguments(self._arguments, text)
            elif self._text is not None:
                text, part = self._say(self._text, text)
            else:
                text, part = self._begin(self._begun + text)
            parsed += part
        return parsed

    def finish(self) -> Parsed:
        """See TextParser."""
        if self._calls is not None:
            held = self._calls.finish()
            return Parsed() if held is None else Parsed(_TAG + held)
        if self._arguments is not None:
            return Parsed()
        return Parsed(_TAG + self._begun if self._text is None else self._text.finish())

    def _say(self, until: Until, text: str) -> tuple[str, Parsed]:
        passed = until.push(text)
        if until.rest is None:
            return "", Parsed(passed)
        self._text, self._begun = None, ""
        return until.rest, Parsed(passed)

    def _begin(self, text: str) -> tuple[str, Parsed]:
        """See whether a list, an object or a name comes; return the text to go on with."""
        stripped = text.lstrip()
        if stripped.startswith(("[", "{")):
            self._calls, self._begun = CallsReader(self._num_calls, self._new_id), ""
            return stripped, Parsed()
        head, brace, rest = text.partition("{")
        if not brace:
            self._begun = text
            return "", Parsed()
        name = head.partition(_ARGS)[0].partition(_CALL_ID)[0].strip()
        if not _NAME.fullmatch(name):
            self._end_of_calls(is_text_next=True)
            return brace + rest, Parsed(_TAG + head)
        self._begun, self._arguments = "", JsonSpan()
        return brace + rest, Parsed(calls=(CallPiece(self._num_calls, "", self._new_id(), name),))

    def _read(self, calls: CallsReader, text: str) -> tuple[str, Parsed]:
        rest = calls.push(text)
        parsed = Parsed(calls=calls.pieces())
        if calls.is_over:
            self._num_calls, self._calls = calls.next_index, None
            self._end_of_calls(is_text_next=calls.refused is not None)
            if calls.refused is not None:
                parsed += Parsed(_TAG + calls.refused)
        return rest, parsed

    def _read_arguments(self, span: JsonSpan, text: str) -> tuple[str, Parsed]:
        for position, character in enumerate(text):
            span.take(character)
            if span.is_done:
                index, self._arguments = self._num_calls, None
                self._num_calls += 1
                self._end_of_calls(is_text_next=False)
                return text[position + 1 :], Parsed(calls=(CallPiece(index, text[: position + 1]),))
        return "", Parsed(calls=(CallPiece(self._num_calls, text),))

    def _end_of_calls(self, is_text_next: bool) -> None:
        self._text = Until(_TAG, drops_space=not is_text_next)
