"""Token ids -> text while they arrive: never half a UTF-8 character, never a part of a stop string.

    token ids ──TokenDecoder──► text that is certain ──StopFilter──► text that is surely before any stop string

Each class takes time linear in its input, whatever the pieces.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

_PENDING_TOKENS_MAX = 3
"""An unfinished UTF-8 character has at most three bytes, hence at most three tokens."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TokenDecoder(Protocol):
    """Turns token ids into text, piece by piece; the pieces together are the text of all ids together."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take ids and return the text that became certain."""
        ...

    def finish(self) -> str:
        """Return what was held back; no push may follow."""
        ...


class ByteDecoder:
    """For byte-level vocabularies: a token is a run of bytes, so UTF-8 decides alone what is certain."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See TokenDecoder."""
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """See TokenDecoder."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other vocabulary: decode the last few ids with the ones before them, and keep what is new.

    A token's text may depend on its neighbours (the space before a word, bytes that make a character together), so a
    short window is decoded again for each token. Byte tokens that make no character come out as replacement characters
    one by one, even where a decoder that saw all of them at once would also take back a good character beside them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], is_skipped: Callable[[int], bool]) -> None:
        """Start a text.

        Args:
            decode: ids -> text, special tokens left out.
            is_skipped: whether an id is a special token, which has no text.
        """
        self._decode = decode
        self._is_skipped = is_skipped
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """See TokenDecoder."""
        return "".join(self._push(token_id) for token_id in token_ids if not self._is_skipped(token_id))

    def finish(self) -> str:
        """See TokenDecoder."""
        return self._release(len(self._pending))

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        if not self._decode([*self._context, *self._pending]).endswith(_UNFINISHED):
            return self._release(len(self._pending))
        if len(self._pending) > _PENDING_TOKENS_MAX:  # then the oldest one cannot be part of what is unfinished
            return self._release(1)
        return ""

    def _release(self, count: int) -> str:
        if count == 0:
            return ""
        released, self._pending = self._pending[:count], self._pending[count:]
        before = self._decode(self._context)
        text = self._decode([*self._context, *released])[len(before) :]
        # Without text it cannot serve as context: the next token would look like the first one.
        if text:
            self._context = released
        return text


class ShownDecoder:
    """Writes some special tokens out, and leaves what is between them to decoders that would skip them."""

    def __init__(self, new_decoder: Callable[[], TokenDecoder], shown: Mapping[int, str]) -> None:
        """Start a text.

        Args:
            new_decoder: starts a text without them.
            shown: their texts.
        """
        self._new_decoder = new_decoder
        self._shown = shown
        self._decoder = new_decoder()

    def push(self, token_ids: Sequence[int]) -> str:
        """See TokenDecoder."""
        return "".join(map(self._push, token_ids))

    def finish(self) -> str:
        """See TokenDecoder."""
        return self._decoder.finish()

    def _push(self, token_id: int) -> str:
        if token_id not in self._shown:
            return self._decoder.push([token_id])
        before, self._decoder = self._decoder.finish(), self._new_decoder()
        return before + self._shown[token_id]


class StopFilter:
    """Lets text through up to the first stop string, and holds back only what may be the beginning of one.

    The stop string that is complete first wins, and the longer one of two that end together, so that the outcome does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: Iterable[str], keeps_stop: bool = False) -> None:
        """Start a text; `keeps_stop`: the stop string is shown too."""
        self._keeps_stop = keeps_stop
        self._stop = sorted(stop, key=len, reverse=True)
        self._held = ""
        self.stopped: str | None = None
        """The stop string that appeared."""

    def push(self, text: str) -> str:
        """Take text and return what may be shown; nothing after a stop string."""
        if self.stopped is not None or not text:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return text[: end if self._keeps_stop else start]
        keep = self._num_possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: it was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_possible(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), len(self._stop[0]) - 1)
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(self, decoder: TokenDecoder, stop: Iterable[str], keeps_stop: bool = False) -> None:
        self._decoder = decoder
        self._filter = StopFilter(stop, keeps_stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that has appeared, or None."""
        return self._filter.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """Take ids and return the text that became certain; nothing any more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        return self._filter.push(self._decoder.push(token_ids))

    def finish(self) -> str:
        """Return the rest of the text. It may complete a stop string: look at `stopped` afterwards."""
        if self.stopped is not None:
            return ""
        return self._filter.push(self._decoder.finish()) + self._filter.finish()
