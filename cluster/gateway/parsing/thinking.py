"""`<think>` ... `</think>` before an answer: the thinking apart from the answer."""

from cluster.gateway.parsing.interface import Parsed, TextParser
from cluster.gateway.parsing.until import Until

OPENING, CLOSING = "<think>", "</think>"


class ThinkingParser:
    """Splits the thinking off and gives the rest to another parser.

        START ──<think>──► THINKING ──</think>──► ANSWER
          └──────── any other text ────────────────▲

    Only an answer that begins with it has a thinking; the text may mention the marker later. White space around the
    thinking belongs to nothing.
    """

    def __init__(self, answer: TextParser | None, is_open: bool) -> None:
        """Begin.

        Args:
            answer: reads what follows the thinking; None: it is text.
            is_open: whether the prompt ends inside the thinking.
        """
        self._answer = answer
        self._thought = Until(CLOSING, drops_space=True) if is_open else None
        self._beginning: str | None = None if is_open else ""
        self._is_space_due = False
        """White space that leads the answer is dropped."""

    @property
    def is_thinking(self) -> bool:
        """Whether the next text belongs to the thinking, as far as is known."""
        return self._thought is not None

    def push(self, text: str) -> Parsed:
        """See TextParser."""
        if self._beginning is not None:
            return self._begin(self._beginning + text)
        if self._thought is not None:
            return self._think(self._thought, text)
        return self._say(text)

    def finish(self) -> Parsed:
        """See TextParser."""
        rest = Parsed()
        if self._beginning:
            beginning, self._beginning = self._beginning, None
            rest = self._say(beginning)
        elif self._thought is not None:
            rest = Parsed(reasoning=self._thought.finish().rstrip())
        return rest if self._answer is None else rest + self._answer.finish()

    def _begin(self, text: str) -> Parsed:
        stripped = text.lstrip()
        if OPENING.startswith(stripped[: len(OPENING)]) and len(stripped) < len(OPENING):
            self._beginning = text
            return Parsed()
        self._beginning = None
        if not stripped.startswith(OPENING):
            return self._say(text)
        self._thought = Until(CLOSING, drops_space=True)
        return self.push(stripped[len(OPENING) :])

    def _think(self, thought: Until, text: str) -> Parsed:
        reasoning = thought.push(text)
        if thought.rest is None:
            return Parsed(reasoning=reasoning)
        self._thought, self._is_space_due = None, True
        return Parsed(reasoning=reasoning) + self.push(thought.rest)

    def _say(self, text: str) -> Parsed:
        if self._is_space_due:
            text = text.lstrip()
            self._is_space_due = not text
        if not text:
            return Parsed()
        return Parsed(text) if self._answer is None else self._answer.push(text)
