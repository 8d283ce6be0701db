"""How the served model writes its answers: which format its calls have, and whether it thinks before it answers."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.gateway.parsing.hermes import HermesFormat
from cluster.gateway.parsing.interface import Parsed, TextParser, ToolFormat
from cluster.gateway.parsing.llama3 import Llama3Format
from cluster.gateway.parsing.mistral import MistralFormat
from cluster.gateway.parsing.thinking import CLOSING, OPENING, ThinkingParser
from cluster.gateway.tool_use import ToolUse
from common.grammar import Form, after_thinking, quoted
from common.text import Text

FormatName = Literal["auto", "hermes", "llama3", "mistral"]
ThinkingName = Literal["auto", "think", "none"]
_FORMATS: dict[str, type[ToolFormat]] = {"hermes": HermesFormat, "llama3": Llama3Format, "mistral": MistralFormat}
_SIGNS = {"[TOOL_CALLS]": "mistral", "<tool_call>": "hermes", "<|python_tag|>": "llama3", "ipython": "llama3"}
"""What a template of each format contains."""
_TAIL_TOKENS = 16
"""Enough to see how a prompt ends."""


class Thinking(enum.Enum):
    """Where a prompt leaves the model."""

    NEVER = "the model does not think"
    POSSIBLE = "it may begin to think"
    OPEN = "it is in the middle of thinking"
    DONE = "the prompt holds a thinking already"


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read one answer."""

    parser: TextParser | None = None
    """None: all of it is text."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the parser must see as text."""
    thinking: ThinkingParser | None = None
    """The parser, if it may meet a thinking."""


class Formats:
    """Of one model. Stateless."""

    def __init__(self, text: Text, tools: FormatName = "auto", thinking: ThinkingName = "auto") -> None:
        """Choose.

        Args:
            text: the model's.
            tools: the format of its calls; auto: by its chat template, `hermes` if that tells nothing.
            thinking: whether it thinks; auto: by its chat template.
        """
        template = text.template_source
        chosen = (
            next((name for sign, name in _SIGNS.items() if sign in template), "hermes") if tools == "auto" else tools
        )
        self.tools: ToolFormat = _FORMATS[chosen]()
        self._text = text
        self._thinks = OPENING in template or CLOSING in template if thinking == "auto" else thinking == "think"

    def thinking_after(self, prompt: Sequence[int]) -> Thinking:
        """Return where a chat's prompt leaves the model."""
        if not self._thinks:
            return Thinking.NEVER
        tail = self._text.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        if tail.endswith(OPENING):
            return Thinking.OPEN
        return Thinking.DONE if tail.endswith(CLOSING) else Thinking.POSSIBLE

    def reading(self, tools: ToolUse | None, thinking: Thinking) -> Reading:
        """Return how to read the answer to a chat."""
        parser: TextParser | None = None
        thought: ThinkingParser | None = None
        markers: tuple[str, ...] = ()
        if tools is not None:
            markers = self.tools.markers
            parser = self.tools.parser(frozenset(tool.name for tool in tools.tools))
            if tools.calls_max == 1:
                parser = _FirstCall(parser)
        if thinking in (Thinking.POSSIBLE, Thinking.OPEN):
            markers += (OPENING, CLOSING)
            parser = thought = ThinkingParser(parser, is_open=thinking is Thinking.OPEN)
        ids = (self._text.token_id(marker) for marker in markers)
        shown = frozenset(i for i in ids if i is not None and self._text.is_special(i))
        return Reading(parser, shown, thought)

    def with_thinking(self, form: Form, thinking: Thinking) -> Form:
        """Return the grammar of an answer, after a thinking if there may be one."""
        if thinking in (Thinking.NEVER, Thinking.DONE):
            return form
        is_special = self.lark_of(CLOSING) != quoted(CLOSING)
        return after_thinking(form, self.lark_of(OPENING), self.lark_of(CLOSING), is_special, thinking is Thinking.OPEN)

    def lark_of(self, marker: str) -> str:
        """Return a marker's Lark expression: its token, if it is a special one, else its text."""
        token_id = self._text.token_id(marker)
        if token_id is None or not self._text.is_special(token_id):
            return quoted(marker)
        return f"<[{token_id}]>"


class _FirstCall:
    """Leaves out all calls but the first."""

    def __init__(self, parser: TextParser) -> None:
        self._parser = parser

    def push(self, text: str) -> Parsed:
        return _first(self._parser.push(text))

    def finish(self) -> Parsed:
        return _first(self._parser.finish())


def _first(parsed: Parsed) -> Parsed:
    return Parsed(parsed.text, parsed.reasoning, tuple(piece for piece in parsed.calls if piece.index == 0))
