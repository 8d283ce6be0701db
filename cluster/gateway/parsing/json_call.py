"""A call written as a JSON object, `{"name": ..., "arguments": {...}}`, read character by character.

Arguments are passed on as they are written, before the object is complete.
"""

import enum
import json

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class JsonSpan:
    """Finds the end of one JSON value. What is inside is not checked: whoever reads it will parse it."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_done = False

    @property
    def text(self) -> str:
        """The value so far."""
        return "".join(self._text)

    @property
    def first(self) -> str:
        """Its first character; empty before that."""
        return self._text[0] if self._text else ""

    def take(self, character: str) -> bool:
        """Take a character; False: the value had ended before it, which only a bare word can do."""
        if not self._text and character in _SPACE:
            return True
        if self._depth == 0 and not self._is_string and self._text and character in _SPACE + ",}]":
            self.is_done = True
            return False
        self._text.append(character)
        if self._is_string:
            self._take_in_string(character)
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_done = self._depth <= 0
        return True

    def _take_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
            self.is_done = self._depth == 0


class _Stage(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    AFTER = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class CallReader:
    """Reads one call.

        START ─{─► KEY ─► COLON ─► VALUE ─► AFTER ─}─► DONE
                    ▲────────────────── , ────┘
        any ── not a call ──► FAILED

    `name` is set as soon as it is known. Arguments wait for it.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.key: str | None = None
        """The first key of the object, once it is known."""
        self._stage = _Stage.START
        self._span = JsonSpan()
        self._key = ""
        self._has_arguments = False
        self._arguments = ""

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._stage is _Stage.DONE

    @property
    def is_failed(self) -> bool:
        """Whether this cannot be a call."""
        return self._stage is _Stage.FAILED

    def arguments(self) -> str:
        """Return, once, the text of the arguments that has come since last asked; nothing before the name."""
        if self.name is None:
            return ""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def take(self, character: str) -> None:
        """Take a character; not after the end."""
        match self._stage:
            case _Stage.VALUE:
                self._take_value(character)
            case _Stage.KEY:
                self._take_key(character)
            case _ if character in _SPACE:
                pass
            case _Stage.START if character == "{":
                self._begin_key()
            case _Stage.COLON if character == ":":
                self._stage, self._span = _Stage.VALUE, JsonSpan()
            case _Stage.AFTER if character == ",":
                self._begin_key()
            case _Stage.AFTER if character == "}":
                self._end()
            case _:
                self._stage = _Stage.FAILED

    def _begin_key(self) -> None:
        self._stage, self._span = _Stage.KEY, JsonSpan()

    def _take_key(self, character: str) -> None:
        self._span.take(character)
        if self._span.first not in ('"', ""):
            if self._span.first == "}":
                self._end()
            else:
                self._stage = _Stage.FAILED
        elif self._span.is_done:
            key = _string(self._span.text)
            if key is None:
                self._stage = _Stage.FAILED
                return
            self._key, self._stage = key, _Stage.COLON
            self.key = self.key if self.key is not None else key

    def _take_value(self, character: str) -> None:
        is_taken = self._span.take(character)
        if self._span.first and self._span.first in "}],:":
            self._stage = _Stage.FAILED
            return
        is_streamed = self._key in _ARGUMENTS and self._span.first == "{" and not self._has_arguments
        if is_streamed:
            self._arguments += character
        if not self._span.is_done:
            return
        self._stage = _Stage.AFTER
        if self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if not is_streamed:
                self._arguments += _as_object(self._span.text)
        elif self._key == "name" and self.name is None:
            self.name = _string(self._span.text)
            if not self.name:
                self._stage = _Stage.FAILED
                return
        if not is_taken:
            self.take(character)

    def _end(self) -> None:
        if self.name is None:
            self._stage = _Stage.FAILED
            return
        self._stage = _Stage.DONE
        if not self._has_arguments:
            self._arguments += "{}"


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _as_object(text: str) -> str:
    """Return arguments that are not written as an object: some models write them as a string, or null for none."""
    return _string(text) or ("{}" if text in ("null", '""') else text)
