"""Shows how a start goes: a spinner with what is being done now, and one line for each thing that is done."""

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class Report:
    """Progress on standard error; what a script may wait for on standard output. Used from one thread."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._doing: dict[str, str] = {}
        self._done: set[str] = set()
        self._last_stage = ""
        self._began = time.monotonic()

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def doing(self, key: str, text: str) -> None:
        """Say that something has begun; it is shown until `done` is called with the same key."""
        if key not in self._done:
            self._doing[key] = text
            self._show()

    def done(self, key: str, text: str) -> None:
        """Say that something is done; the first time only."""
        if key in self._done:
            return
        self._done.add(key)
        self._doing.pop(key, None)
        self.step(text)
        self._show()

    def model_progress(self, stage: str, fraction: float | None) -> None:
        """Show how the model comes along; see model_store.Progress."""
        self.doing("model", stage if fraction is None else f"{stage} {fraction:.0%}")
        if not self._err.is_terminal and stage != self._last_stage:
            self.step(stage)
        self._last_stage = stage

    def step(self, text: str) -> None:
        """Write one line of progress."""
        self._err.print(f"{time.monotonic() - self._began:6.1f} s  {text}", markup=False)

    def say(self, text: str) -> None:
        """Write one line to standard output."""
        self._out.print(text, markup=False)

    def close(self) -> None:
        """Take the spinner away; lines can still be written."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self) -> None:
        if not self._err.is_terminal:
            return
        text = escape(", ".join(self._doing.values()))
        if not text:
            self.close()
        elif self._status is None:
            self._status = self._err.status(text)
            self._status.start()
        else:
            self._status.update(text)
