"""A report is one well-formed page that needs nothing else, for any run: empty, failed, or large."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.records import RatePoint, RequestRecord, RunFile, ServerTiming, Slo
from loadtest.report import write_comparison, write_report
from loadtest.svg import Axis, Series, line_chart, stacked_bars

SLO = Slo(1.0, 0.1)
VOID = {"meta", "line", "path", "rect", "circle"}


class Balance(HTMLParser):
    """Checks that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def checked(page: str) -> str:
    """Return the page after checking that it is balanced and refers to nothing outside."""
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"(src|href)=|url\(|@import|nan|inf[^o]", page)
    return page


def records(count: int, workers: int = 2) -> list[RequestRecord]:
    return [
        RequestRecord(
            request_id=f"r{i}",
            session=i,
            turn=0,
            intended_s=i * 0.1,
            sent_s=i * 0.1,
            first_token_s=i * 0.1 + 0.2 + i * 0.01,
            last_token_s=i * 0.1 + 1,
            end_s=i * 0.1 + 1,
            prompt_tokens=10,
            output_tokens=3,
            gaps_s=(0.1, 0.2),
            prefill_worker=f"prefill-{i % workers}",
            decode_worker=f"decode-{i % workers}",
            server=ServerTiming(0.15, 0.05, 0.1, 0.01, 0.02),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "what",
    [
        [],
        records(1),
        records(40),
        records(60, workers=20),
        [RequestRecord("r", 0, 0, 0, 0, end_s=1, error="DeadlineError")],
    ],
    ids=["empty", "one", "many", "many workers", "all failed"],
)
def test_a_page_is_written_for_any_run(tmp_path: Path, what: list[RequestRecord]) -> None:
    write_report(RunFile({"target": "<x>"}, SLO, what), tmp_path / "r.html", "A & B")

    page = checked((tmp_path / "r.html").read_text())
    assert "<h1>A &amp; B</h1>" in page
    assert "target: &lt;x&gt;" in page


def test_a_full_report_has_every_plot(tmp_path: Path) -> None:
    run = RunFile({}, SLO, records(40), (RatePoint(1, 1, 1), RatePoint(2, 0.8, 1.6)))

    write_report(run, tmp_path / "r.html", "run")

    titles = re.findall(r"<figcaption>(.*?)</figcaption>", (tmp_path / "r.html").read_text())
    assert [title.split(",")[0] for title in titles] == [
        "Goodput against offered rate",
        "Attainment against offered rate",
        "TTFT",
        "TPOT",
        "ITL",
        "End to end",
        "Requests in prefill or its queue",
        "Requests in decode",
        "Until the second token",
        "Share of requests within the SLO",
    ]


def test_a_comparison_names_both_runs(tmp_path: Path) -> None:
    runs = [(name, RunFile({}, SLO, records(5))) for name in ("left", "right")]

    write_comparison(runs, tmp_path / "c.html")

    page = checked((tmp_path / "c.html").read_text())
    assert "<th>left</th><th>right</th>" in page
    for name in ("left", "right"):
        assert f"{name}: Requests in prefill or its queue, by worker" in page
        assert f"{name}: Requests in decode, by worker" in page


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), min_size=1, max_size=700),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=30)
def test_lines_stay_inside_their_figure(points: list[tuple[float, float]], is_log: bool, is_step: bool) -> None:
    chart = line_chart("t", [Series("s", sorted(points), is_step)], Axis("x", is_log), Axis("y"))

    paths = re.findall(r' d="([^"]*)"', chart)
    numbers = [float(number) for path in paths for number in re.findall(r"[-\d.]+", path)]
    assert all(0 <= number <= 560 for number in numbers)


def test_nothing_to_draw_is_no_figure() -> None:
    assert line_chart("t", [Series("s", [])], Axis("x"), Axis("y")) == ""
    assert stacked_bars("t", [], {}, "s") == ""
