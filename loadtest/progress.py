"""What a person sees while a run goes on: one small table, redrawn four times a second."""

import time
from collections import Counter, deque
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from loadtest.records import RequestRecord

_RECENT = 200


class LiveProgress:
    """Counts a run's requests and shows them. Rich draws from its own thread, reading only.

    Shows nothing where the console is no terminal.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._started = time.monotonic()
        self._sent = 0
        self._ended = 0
        self._tokens = 0
        self._errors: Counter[str] = Counter()
        self._recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=True)
        self._is_shown = console.is_terminal

    def __enter__(self) -> Self:
        if self._is_shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._live.stop()

    def on_sent(self) -> None:
        """Note that a request was sent."""
        self._sent += 1

    def on_record(self, record: RequestRecord) -> None:
        """Note that a request has ended."""
        self._ended += 1
        self._tokens += record.output_tokens
        self._recent.append(record)
        if record.error is not None:
            self._errors[record.error] += 1

    def _table(self) -> RenderableType:
        elapsed = time.monotonic() - self._started
        recent = list(self._recent)
        table = Table(title=self._title, title_justify="left", expand=False)
        row = {
            "elapsed": f"{elapsed:.0f} s",
            "sent": str(self._sent),
            "running": str(self._sent - self._ended),
            "ended": str(self._ended),
            "requests/s": f"{self._ended / max(elapsed, 1e-9):.2f}",
            "tokens/s": f"{self._tokens / max(elapsed, 1e-9):.1f}",
            "TTFT p50": _median_ms([record.ttft_s for record in recent]),
            "TPOT p50": _median_ms([record.tpot_s for record in recent]),
            "errors": ", ".join(f"{name} {count}" for name, count in self._errors.copy().items()) or "0",
        }
        for name in row:
            table.add_column(name, justify="right")
        table.add_row(*row.values())
        return table


def _median_ms(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{known[len(known) // 2] * 1000:.0f} ms" if known else "-"
