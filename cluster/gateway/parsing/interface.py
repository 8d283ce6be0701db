"""What a parser of answers takes and gives, and what a format of tool calls must know.

A parser's result does not depend on how the text was cut: the sum of all that it gives is the same for any pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.grammar import Form, Json

CALLS_MAX = 16
"""Most calls of one answer that a grammar allows: a model could go on for ever."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that the model may call."""

    name: str
    description: str
    parameters: Json
    """A JSON schema of an object."""

    def to_json(self) -> Json:
        """Return it as chat templates know it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What became certain of a call."""

    index: int
    arguments: str
    """More of the JSON text."""
    call_id: str = ""
    """In the first piece, like the name."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What became certain of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __add__(self, other: "Parsed") -> "Parsed":
        return Parsed(self.text + other.text, self.reasoning + other.reasoning, self.calls + other.calls)


class TextParser(Protocol):
    """Reads one answer. Owned by the task that serves the request."""

    def push(self, text: str) -> Parsed:
        """Take text and return what became certain."""
        ...

    def finish(self) -> Parsed:
        """Return what was held back; no push may follow."""
        ...


NewId = Callable[[], str]
"""Makes an id for a call."""


class ToolFormat(Protocol):
    """How one family of models writes its calls. Stateless."""

    markers: tuple[str, ...]
    """Tokens that must be seen in the text, should they be special ones."""

    def parser(self, names: frozenset[str]) -> TextParser:
        """Begin an answer.

        Args:
            names: of the tools on offer.
        """
        ...

    def form(self, tools: Sequence[Tool], calls_max: int, lark_of: Callable[[str], str]) -> Form:
        """Return the grammar of at least one call, and at most `calls_max`.

        Args:
            tools: that may be called; their schemas have been checked.
            calls_max: at least 1.
            lark_of: a marker -> its Lark expression.
        """
        ...

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as the model writes it: for templates that know no tools."""
        ...
