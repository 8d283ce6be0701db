"""One self-contained HTML page for a run or a comparison: numbers and plots, readable without a network."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from loadtest import plots
from loadtest.metrics import Summary, summarize
from loadtest.records import RunFile, Slo
from loadtest.tables import facts, latencies

_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--soft:#667;--line:#e3e6ea;--c0:#2f6fde;--c1:#e0822b;--c2:#2a9d6f;--c3:#c2456b;--c4:#7a5bd0;
--c5:#8a8f2c;--c6:#1d9bb5;--c7:#94623c}
@media (prefers-color-scheme:dark){
:root{--bg:#14171b;--fg:#e6e9ed;--soft:#9aa4b0;--line:#2c323a;--c0:#6ea2ff;--c1:#f0a35e;
--c2:#55c79a;--c3:#ea7d9e;--c4:#a98ff0;--c5:#bcc15c;--c6:#5cc9e0;--c7:#c9966c}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;
max-width:1200px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}.meta{color:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .9rem .25rem 0;text-align:right;
border-bottom:1px solid var(--line)}td:first-child,th:first-child{text-align:left}.wide{overflow-x:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1.5rem}figure{margin:0}
figcaption{font-weight:600}svg{width:100%;height:auto}.tick,.label{font-size:11px;fill:var(--soft)}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.mark{stroke:var(--soft);stroke-dasharray:4 4}
.key span{margin-right:1rem;font-size:.85rem}.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;
margin-right:.35em}.warn{border-left:4px solid var(--c1);padding:.3rem .8rem}
"""
_LAG_WARNING_S = 0.05


def write_report(run: RunFile, path: Path, title: str) -> None:
    """Write the page of one run.

    Args:
        run: the run; its summary is computed from its records.
        path: where to; missing folders are made.
        title: heading.
    """
    summary = summarize(run.records, run.slo)
    runs = [(title, run.records)]
    charts = [
        *plots.goodput_by_rate(run.points),
        *plots.latency_cdfs(runs, run.slo),
        *plots.load_timeline(run.records),
        plots.ttft_breakdown(run.records),
        plots.attainment_by_scale(runs, run.slo),
    ]
    sections = [
        _meta(run),
        _warning(summary),
        "<h2>Latency, milliseconds</h2>",
        _latency_table({"": summary}),
        "<h2>Throughput and quality of service</h2>",
        _facts_table({"": summary}, run.slo),
        "<h2>Plots</h2>",
        _grid(charts),
    ]
    _write(path, title, sections)


def write_comparison(
    runs: Sequence[tuple[str, RunFile]], path: Path, title: str | None = None, charts: Sequence[str] = ()
) -> None:
    """Write the page that compares runs, all judged by the first one's SLO.

    Args:
        runs: named runs, at least one, at most eight.
        path: where to; missing folders are made.
        title: heading; None: the names.
        charts: further plots, shown before the others.
    """
    slo = runs[0][1].slo
    summaries = {name: summarize(run.records, slo) for name, run in runs}
    named = [(name, run.records) for name, run in runs]
    charts = [*charts, *plots.latency_cdfs(named, slo), plots.attainment_by_scale(named, slo)]
    for name, records in named:
        if any(record.decode_worker is not None for record in records):
            charts += plots.load_timeline(records, f"{name}: ")
    sections = [
        *(f"<p class=meta><b>{escape(name)}</b>: {_meta_line(run)}</p>" for name, run in runs),
        "<h2>Latency, milliseconds</h2>",
        _latency_table(summaries),
        "<h2>Throughput and quality of service</h2>",
        _facts_table(summaries, slo),
        "<h2>Plots</h2>",
        _grid(charts),
    ]
    _write(path, title or " against ".join(summaries), sections)


def _write(path: Path, title: str, sections: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{''.join(sections)}</html>\n"
    )
    path.write_text(page)


def _meta(run: RunFile) -> str:
    return f"<p class=meta>{_meta_line(run)}</p>"


def _meta_line(run: RunFile) -> str:
    return " · ".join(f"{escape(str(key))}: {escape(str(value))}" for key, value in run.meta.items())


def _warning(summary: Summary) -> str:
    if summary.send_lag.p99 <= _LAG_WARNING_S:
        return ""
    lag = summary.send_lag.p99 * 1000
    return (
        f"<p class=warn>The client sent up to {lag:.0f} ms late (p99): it was part of the bottleneck. "
        "Read the latencies from the intended sending.</p>"
    )


def _latency_table(summaries: dict[str, Summary]) -> str:
    head = "<tr><th></th><th>mean</th><th>p50</th><th>p90</th><th>p99</th><th>max</th><th>values</th></tr>"
    rows = []
    for label in latencies(next(iter(summaries.values()))):
        for name, summary in summaries.items():
            values = latencies(summary)[label]
            numbers = (values.mean, values.p50, values.p90, values.p99, values.max)
            cells = "".join(f"<td>{value * 1000:.1f}</td>" for value in numbers)
            first = " ".join(filter(None, [label.removesuffix(" ms"), name and f"({escape(name)})"]))
            rows.append(f"<tr><td>{first}</td>{cells}<td>{values.count}</td></tr>")
    return f"<div class=wide><table>{head}{''.join(rows)}</table></div>"


def _facts_table(summaries: dict[str, Summary], slo: Slo) -> str:
    columns = {name: facts(summary, slo) for name, summary in summaries.items()}
    head = "" if len(columns) == 1 else f"<tr><th></th>{''.join(f'<th>{escape(name)}</th>' for name in columns)}</tr>"
    labels = dict.fromkeys(label for cells in columns.values() for label in cells)
    rows = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(_cell(cells.get(label, '-')) for cells in columns.values())}</tr>"
        for label in labels
    )
    return f"<div class=wide><table>{head}{rows}</table></div>"


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'
