"""Summaries as text for people: one run, two runs side by side, a goodput search."""

from collections.abc import Sequence

from rich.table import Table

from loadtest.metrics import Distribution, Summary
from loadtest.records import RatePoint, Slo

_VISIBLE = 1.005
"""A ratio that is not 1.00 with two decimals."""


def summary_table(summary: Summary, slo: Slo, title: str) -> Table:
    """Return one run's numbers; latencies in milliseconds."""
    table = Table(title=title, title_justify="left")
    for name in ("", "mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right" if name else "left")
    for name, values in latencies(summary).items():
        table.add_row(name, *(f"{value * 1000:.1f}" if values.count else "-" for value in _columns(values)))
    table.add_section()
    for name, text in facts(summary, slo).items():
        table.add_row(name, text)
    return table


def latencies(summary: Summary) -> dict[str, Distribution]:
    """Return the latency distributions by their label."""
    return {
        "TTFT ms": summary.ttft,
        "TTFT from intended ms": summary.ttft_intended,
        "TPOT ms": summary.tpot,
        "ITL ms": summary.itl,
        "E2E ms": summary.e2e,
    }


def facts(summary: Summary, slo: Slo) -> dict[str, str]:
    """Return everything else that is known by its label, formatted. A simulated client is never late."""
    errors = ", ".join(f"{name} {count}" for name, count in sorted(summary.errors.items())) or "none"
    known = {
        "requests": f"{summary.completed} of {summary.requests} answered",
        "errors": errors,
        "duration": f"{summary.duration_s:.2f} s",
        "requests/s": f"{summary.requests_per_s:.3f}",
        "output tokens/s": f"{summary.output_tokens_per_s:.1f}",
        "prompt tokens/s": f"{summary.prompt_tokens_per_s:.1f}",
        "cache hit": f"{summary.cache_hit:.1%}",
        f"SLO met (TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s)": f"{summary.slo_attainment:.1%}",
        "goodput, requests/s": f"{summary.goodput_per_s:.3f}",
        "decode workers used": str(summary.decode_workers or "unknown"),
    }
    if summary.decode_workers:
        known["busiest of these / mean"] = f"{summary.load_imbalance:.2f}"
    if summary.send_lag.max > 0:
        known["client lag p99"] = f"{summary.send_lag.p99 * 1000:.1f} ms"
    return known


def comparison_table(first: Summary, second: Summary, names: tuple[str, str]) -> Table:
    """Return two runs side by side, with the one that is better and by how much."""
    table = Table(title=f"{names[0]} (A) against {names[1]} (B)", title_justify="left")
    for name in ("", "A", "B", "better"):
        table.add_column(name, justify="right" if name else "left")
    for (label, a), b in zip(latencies(first).items(), latencies(second).values(), strict=True):
        for column in ("mean", "p50", "p90", "p99"):
            x, y = getattr(a, column), getattr(b, column)
            table.add_row(f"{label} {column}", f"{x * 1000:.1f}", f"{y * 1000:.1f}", _better(y, x))
        table.add_section()
    rates = {
        "requests/s": (first.requests_per_s, second.requests_per_s),
        "output tokens/s": (first.output_tokens_per_s, second.output_tokens_per_s),
        "SLO attainment": (first.slo_attainment, second.slo_attainment),
        "goodput, requests/s": (first.goodput_per_s, second.goodput_per_s),
        "cache hit": (first.cache_hit, second.cache_hit),
    }
    for label, (x, y) in rates.items():
        table.add_row(label, f"{x:.3f}", f"{y:.3f}", _better(x, y))
    errors = [str(sum(summary.errors.values())) for summary in (first, second)]
    table.add_row("errors", *errors, "")
    return table


def search_table(points: Sequence[RatePoint], best_rate: float, attainment: float) -> Table:
    """Return the measurements of a goodput search by rate."""
    table = Table(title=f"{best_rate:.3f} sessions/s with {attainment:.0%} in SLO", title_justify="left")
    for name in ("rate", "in SLO", "goodput"):
        table.add_column(name, justify="right")
    for point in sorted(points, key=lambda point: point.rate):
        table.add_row(f"{point.rate:.3f}", f"{point.attainment:.1%}", f"{point.goodput:.3f}")
    return table


def _columns(values: Distribution) -> tuple[float, ...]:
    return values.mean, values.p50, values.p90, values.p99, values.max


def _better(a: float, b: float) -> str:
    """Return which of two numbers that should be large is better, and how many times."""
    if a <= 0 or b <= 0:
        return "-"
    name, ratio = ("B", b / a) if b > a else ("A", a / b)
    return "equal" if ratio < _VISIBLE else f"{name} {ratio:.2f}x"
