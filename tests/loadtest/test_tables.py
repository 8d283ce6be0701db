"""Tables show what is known and means something, and say which of two runs is better."""

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.metrics import summarize
from loadtest.records import RequestRecord, RunFile, Slo
from loadtest.report import write_comparison
from loadtest.tables import comparison_table, facts

SLO = Slo(1.0, 0.1)


def record(ttft_s: float, lag_s: float, worker: str | None) -> RequestRecord:
    return RequestRecord("r", 0, 0, 0.0, lag_s, lag_s + ttft_s, 1.0, 1.0, decode_worker=worker, output_tokens=2)


def rows(table: Table) -> dict[str, list[str]]:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines()]
    return {cell[0]: cell[1:] for cell in cells if cell}


def test_balance_is_told_where_workers_are_known() -> None:
    known = facts(summarize([record(0.1, 0.001, "d0")], SLO), SLO)
    unknown = facts(summarize([record(0.1, 0.001, None)], SLO), SLO)

    assert known["busiest of these / mean"] == "1.00"
    assert known.keys() - unknown.keys() == {"busiest of these / mean"}
    assert unknown["decode workers used"] == "unknown"


def test_a_lag_is_told_of_clients_that_have_one() -> None:
    real = facts(summarize([record(0.1, 0.001, "d0")], SLO), SLO)
    simulated = facts(summarize([record(0.1, 0.0, "d0")], SLO), SLO)

    assert real.keys() - simulated.keys() == {"client lag p99"}


def test_a_comparison_says_which_is_better_and_by_how_much() -> None:
    slow, fast = (summarize([record(ttft_s, 0.0, None)], SLO) for ttft_s in (0.2, 0.1))

    assert rows(comparison_table(slow, fast, ("x", "y")))["TTFT ms mean"] == ["200.0", "100.0", "B 2.00x"]
    assert rows(comparison_table(fast, slow, ("x", "y")))["TTFT ms mean"] == ["100.0", "200.0", "A 2.00x"]
    assert rows(comparison_table(fast, fast, ("x", "y")))["TTFT ms mean"] == ["100.0", "100.0", "equal"]


def test_a_page_compares_runs_of_which_different_things_are_known(tmp_path: Path) -> None:
    runs = [RunFile({}, SLO, [record(0.1, 0.0, None)]), RunFile({}, SLO, [record(0.1, 0.001, "d0")])]

    write_comparison(list(zip("AB", runs, strict=True)), tmp_path / "page.html")

    assert "<td>client lag p99</td><td>-</td><td>1.0 ms</td>" in (tmp_path / "page.html").read_text()
