"""Calls being read from a text: their pieces out, or the text back if it turns out to be something else."""

from collections.abc import Callable

from cluster.gateway.parsing.interface import CallPiece, NewId
from cluster.gateway.parsing.json_call import CallReader

_SPACE = " \t\r\n"


class CallsReader:
    """Reads one call, or a list of calls in brackets.

        START ─{─► CALL ─}─► over          START ─[─► BETWEEN ─{─► CALL ─}─► BETWEEN ─]─► over
          └────── anything else, or a call without a name ──► over, and `refused` is all of it

    What breaks off after the first call has its name is dropped.
    """

    def __init__(self, first_index: int, new_id: NewId, is_wanted: Callable[[CallReader], bool] | None = None) -> None:
        """Begin.

        Args:
            first_index: of the first call.
            new_id: makes ids.
            is_wanted: asked when the first key and when the name of a call is known: False refuses it.
        """
        self.next_index = first_index
        self.refused: str | None = None
        """The text, if it was no call."""
        self.is_over = False
        self._new_id = new_id
        self._is_wanted = is_wanted
        self._is_list = False
        self._call: CallReader | None = None
        self._is_named = False
        self._has_named = False
        self._raw = ""
        self._pieces: list[CallPiece] = []

    def push(self, text: str) -> str:
        """Take text; return what follows the end of the calls, which is empty as long as they go on."""
        for position, character in enumerate(text):
            if not self._has_named:
                self._raw += character
            self._take(character)
            if self.is_over:
                self._collect()
                return text[position + 1 :]
        self._collect()
        return ""

    def pieces(self) -> tuple[CallPiece, ...]:
        """Return, once, what became certain since last asked."""
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    def finish(self) -> str | None:
        """Return the text that was held back because it could have become a call; None if it has."""
        return None if self._has_named else self._raw

    def _take(self, character: str) -> None:
        if self._call is not None:
            self._take_in_call(self._call, character)
        elif character == "{":
            self._call, self._is_named = CallReader(), False
            self._call.take(character)
        elif character == "[" and not self._is_list:
            self._is_list = True
        elif self._is_list and self._has_named and character == "]":
            self.is_over = True
        elif not (character in _SPACE or (self._is_list and self._has_named and character == ",")):
            self._refuse()

    def _take_in_call(self, call: CallReader, character: str) -> None:
        key, name = call.key, call.name
        call.take(character)
        is_news = (call.key, call.name) != (key, name)
        if call.is_failed or (is_news and self._is_wanted is not None and not self._is_wanted(call)):
            self._refuse()
        elif call.is_done:
            self._collect()
            self.next_index += 1
            self._call = None
            self._has_named = True
            self.is_over = not self._is_list
        elif call.name is not None:
            self._has_named = True

    def _refuse(self) -> None:
        self.is_over = True
        if not self._has_named:
            self.refused = self._raw
        elif self._call is not None and self._call.name is not None:
            self._collect()
            self.next_index += 1
        self._call = None

    def _collect(self) -> None:
        if self._call is None or self._call.name is None:
            return
        arguments = self._call.arguments()
        if not self._is_named:
            self._is_named = True
            self._pieces.append(CallPiece(self.next_index, arguments, self._new_id(), self._call.name))
        elif arguments:
            self._pieces.append(CallPiece(self.next_index, arguments))
