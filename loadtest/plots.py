"""The plots of a report, computed from records: CDFs, load by worker, TTFT breakdown, attainment, goodput."""

from collections.abc import Callable, Iterable, Sequence

from loadtest.metrics import breakdown
from loadtest.records import RatePoint, RequestRecord, Slo
from loadtest.svg import Axis, Marker, Series, line_chart, stacked_bars

_WORKERS_SHOWN = 8
_TIME_STEPS = 300
_SLO_SCALES = [0.25 * 1.12**i for i in range(25)]

Runs = Sequence[tuple[str, Sequence[RequestRecord]]]
"""Named runs: one in a report of a run, several in a comparison."""


def latency_cdfs(runs: Runs, slo: Slo) -> list[str]:
    """Return the CDFs of TTFT, TPOT, ITL and end-to-end time, in milliseconds."""
    measures: list[tuple[str, Callable[[RequestRecord], Iterable[float | None]], list[Marker]]] = [
        ("TTFT", lambda r: (r.ttft_intended_s,), [Marker(slo.ttft_s * 1000, "target")]),
        ("TPOT", lambda r: (r.tpot_s,), [Marker(slo.tpot_s * 1000, "target")]),
        ("ITL", lambda r: r.gaps_s, []),
        ("End to end", lambda r: (r.e2e_s,), []),
    ]
    charts = []
    for label, values_of, markers in measures:
        series = [Series(name, _cdf(v for r in records for v in values_of(r))) for name, records in runs]
        is_log = any(_spans_decades(item.points) for item in series)
        axis = Axis("milliseconds", is_log=is_log)
        charts.append(line_chart(f"{label}, share of values below", series, axis, Axis("share"), markers, 1.0))
    return charts


def load_timeline(records: Sequence[RequestRecord], name: str = "") -> list[str]:
    """Return the number of requests on each prefill and each decode worker over time; `name` begins the titles."""
    prefill, decode = [], []
    for record in records:
        end_of_prefill = record.end_s if record.first_token_s is None else record.first_token_s
        if record.prefill_worker is not None:
            prefill.append((record.prefill_worker, record.sent_s, end_of_prefill))
        if record.decode_worker is not None:
            decode.append((record.decode_worker, end_of_prefill, record.end_s))
    return [
        line_chart(
            f"{name}Requests in {phase}, by worker", _by_worker(ones), Axis("seconds"), Axis("requests"), y_max=1.0
        )
        for phase, ones in (("prefill or its queue", prefill), ("decode", decode))
    ]


def ttft_breakdown(records: Sequence[RequestRecord]) -> str:
    """Return mean parts of TTFT (and what lies between first and second token), for bands of TTFT."""
    told = sorted((r for r in records if r.server is not None and r.ttft_s is not None), key=lambda r: r.ttft_s or 0.0)
    cuts = {"all": (0.0, 1.0), "fastest 50 %": (0.0, 0.5), "50-90 %": (0.5, 0.9), "90-99 %": (0.9, 0.99)}
    cuts["slowest 1 %"] = (0.99, 1.0)
    bands = {label: told[int(low * len(told)) : _end(high, len(told))] for label, (low, high) in cuts.items()}
    means = {label: breakdown(band) for label, band in bands.items() if band}
    rows = list(means.values())
    parts = {
        "queue": [row.queue_s * 1000 for row in rows],
        "prefill": [row.prefill_s * 1000 for row in rows],
        "network and client": [row.network_s * 1000 for row in rows],
        "then: transfer exposed": [row.transfer_exposed_s * 1000 for row in rows],
        "first decode": [row.first_decode_s * 1000 for row in rows],
    }
    return stacked_bars("Until the second token, by TTFT band (mean)", list(means), parts, "milliseconds")


def attainment_by_scale(runs: Runs, slo: Slo) -> str:
    """Return the share of requests within the SLO when both targets are scaled (DistServe, figure 8)."""
    series = []
    for name, records in runs:
        if records:
            points = [(scale, sum(slo.is_met(r, scale) for r in records) / len(records)) for scale in _SLO_SCALES]
            series.append(Series(name, points))
    x = Axis("both targets multiplied by", is_log=True)
    return line_chart("Share of requests within the SLO", series, x, Axis("share"), [Marker(1.0, "target")], 1.0)


def goodput_by_rate(points: Sequence[RatePoint]) -> list[str]:
    """Return goodput and attainment against the offered rate; empty without a search."""
    if len(points) < 2:
        return []
    ordered = sorted(points, key=lambda point: point.rate)
    rate = Axis("offered sessions per second")
    goodput = [Series("goodput", [(point.rate, point.goodput) for point in ordered])]
    attainment = [Series("in SLO", [(point.rate, point.attainment) for point in ordered])]
    return [
        line_chart("Goodput against offered rate", goodput, rate, Axis("requests/s in SLO")),
        line_chart("Attainment against offered rate", attainment, rate, Axis("share"), y_max=1.0),
    ]


def _cdf(values: Iterable[float | None]) -> list[tuple[float, float]]:
    ordered = sorted(value * 1000 for value in values if value is not None)
    return [(value, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]


def _spans_decades(points: Sequence[tuple[float, float]]) -> bool:
    return bool(points) and points[-1][0] > 30 * max(points[len(points) // 2][0], 1e-6)


def _end(share: float, count: int) -> int:
    return count if share == 1.0 else int(share * count)


def _by_worker(intervals: Sequence[tuple[str, float, float]]) -> list[Series]:
    """Return a line for each worker; with more workers than colours, the busiest, the middle one and the idlest."""
    if not intervals:
        return []
    end = max(item[2] for item in intervals)
    step = max(end, 1e-9) / _TIME_STEPS
    counts: dict[str, list[int]] = {}
    for worker, begin, until in intervals:
        deltas = counts.setdefault(worker, [0] * (_TIME_STEPS + 2))
        deltas[max(0, int(begin / step))] += 1
        deltas[int(until / step) + 1] -= 1
    lines = {worker: _running_sums(deltas) for worker, deltas in sorted(counts.items())}
    if len(lines) > _WORKERS_SHOWN:
        columns = [sorted(column) for column in zip(*lines.values(), strict=True)]
        middle = len(lines) // 2
        lines = {
            f"busiest of {len(lines)}": [column[-1] for column in columns],
            "median": [column[middle] for column in columns],
            "idlest": [column[0] for column in columns],
        }
    return [
        Series(worker, [(i * step, float(value)) for i, value in enumerate(values)], is_step=True)
        for worker, values in lines.items()
    ]


def _running_sums(deltas: Sequence[int]) -> list[int]:
    level, sums = 0, []
    for delta in deltas[: _TIME_STEPS + 1]:
        level += delta
        sums.append(level)
    return sums
