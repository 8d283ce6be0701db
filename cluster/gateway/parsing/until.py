"""Text up to a marker, while it arrives in pieces."""


class Until:
    """Lets text through up to a marker, and holds back only what may be its beginning, or white space before it.

    White space right before the marker is dropped with it, and at the beginning where `drops_space` says so.
    """

    def __init__(self, marker: str, *, drops_space: bool = False) -> None:
        self._marker = marker
        self._drops_space = drops_space
        self._held = ""
        self.rest: str | None = None
        """What followed the marker in the piece that completed it; None: it has not been found."""

    def push(self, text: str) -> str:
        """Take text and return what comes before any marker; nothing may be pushed once it is found."""
        assert self.rest is None
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        text = self._held + text
        start = text.find(self._marker)
        if start >= 0:
            self._held, self.rest = "", text[start + len(self._marker) :]
            return text[:start].rstrip()
        passed = text[: len(text) - self._num_possible(text)].rstrip()
        self._held = text[len(passed) :]
        return passed

    def finish(self) -> str:
        """Return what was held back: it was no marker."""
        held, self._held = self._held, ""
        return held

    def _num_possible(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins the marker."""
        for length in range(min(len(text), len(self._marker) - 1), 0, -1):
            if self._marker.startswith(text[-length:]):
                return length
        return 0
