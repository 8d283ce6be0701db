"""What a person sees while a run goes on says what has happened by then; where nobody looks, nothing is written."""

import io

from rich.console import Console

from loadtest.progress import LiveProgress
from loadtest.records import RequestRecord


def record(ttft_s: float, num_tokens: int, error: str | None = None) -> RequestRecord:
    first, last = (None, None) if error else (ttft_s, ttft_s + 0.01 * (num_tokens - 1))
    return RequestRecord("r", 0, 0, 0.0, 0.0, first, last, output_tokens=num_tokens, error=error)


def seen(is_terminal: bool) -> str:
    """Return what a console was sent by a run of four requests, of which one failed and one still runs."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    with LiveProgress(console, "127.0.0.1:1, fake") as progress:
        for _ in range(4):
            progress.on_sent()
        for ended in (record(0.1, 5), record(0.3, 5), record(0.0, 0, "OverloadedError")):
            progress.on_record(ended)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_says_what_was_sent_what_runs_what_failed_and_how_fast_it_was() -> None:
    text = seen(is_terminal=True)

    assert "127.0.0.1:1, fake" in text
    (row,) = [line for line in text.splitlines() if "OverloadedError 1" in line]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells[1:4] == ["4", "1", "3"]
    assert cells[6:8] == ["300 ms", "10 ms"]


def test_nothing_is_written_where_the_console_is_no_terminal() -> None:
    assert seen(is_terminal=False) == ""
