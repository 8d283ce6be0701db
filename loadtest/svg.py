"""Plots as inline SVG: lines and stacked bars, drawn here so that a report needs no network and no library.

Colours are CSS variables of the page (`--c0` to `--c7`), so light and dark come from one drawing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 44
COLOURS = 8
_POINTS_MAX = 600


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    name: str
    points: Sequence[tuple[float, float]]
    is_step: bool = False
    """Hold each value until the next point, instead of joining them."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis."""

    label: str
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Marker:
    """A dashed vertical line, e.g. a target."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to pixels along one axis."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        value = math.log10(max(value, self.low)) if self.is_log else value
        share = (value - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1,) if len(decades) > 4 else (1, 2, 5)
            values = [10.0**decade * step for decade in decades for step in steps]
            return [value for value in values if self.low <= value * 1.0001 and value <= self.high * 1.0001]
        step = _nice_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def line_chart(
    title: str, series: Sequence[Series], x: Axis, y: Axis, markers: Sequence[Marker] = (), y_max: float | None = None
) -> str:
    """Return a figure with one line for each series; the empty string when there is nothing to draw.

    Args:
        title: heading of the figure.
        series: at most eight look different.
        x: horizontal axis; on a logarithmic one values that are not positive are drawn at its low end.
        y: vertical axis, likewise.
        markers: vertical lines.
        y_max: top of the y axis; None: the largest value.
    """
    series = [item for item in series if item.points]
    if not series:
        return ""
    xs = [point[0] for item in series for point in item.points]
    ys = [point[1] for item in series for point in item.points]
    x_scale = _scale(xs, x.is_log, _LEFT, WIDTH - _RIGHT)
    y_scale = _scale([*ys, 0.0, y_max or max(ys)] if not y.is_log else ys, y.is_log, HEIGHT - _BOTTOM, _TOP)
    body = _frame(x_scale, y_scale, x, y)
    for marker in markers:
        if x_scale.low <= marker.x <= x_scale.high:
            at = x_scale.at(marker.x)
            body.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
            body.append(f'<text class="tick" x="{at + 4:.1f}" y="{HEIGHT - _BOTTOM - 6}">{escape(marker.label)}</text>')
    for index, item in enumerate(series):
        colour = f"var(--c{index % COLOURS})"
        body.append(f'<path d="{_path(item, x_scale, y_scale)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(item.points) < 30 and not item.is_step:
            body += [
                f'<circle cx="{x_scale.at(a):.1f}" cy="{y_scale.at(b):.1f}" r="3" fill="{colour}"/>'
                for a, b in item.points
            ]
    return _figure(title, body, [item.name for item in series])


def stacked_bars(title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return a figure with one horizontal bar for each label, made of the parts; empty when there is nothing to draw.

    Args:
        title: heading of the figure.
        labels: names of the bars.
        parts: for each part its values, one for each bar.
        unit: of the values.
    """
    totals = [sum(values[i] for values in parts.values()) for i in range(len(labels))]
    if not totals or max(totals) <= 0:
        return ""
    left = 96
    scale = _Scale(0.0, max(totals) * 1.12, left, WIDTH - _RIGHT, False)
    bottom = HEIGHT - _BOTTOM
    pitch = (bottom - _TOP) / len(labels)
    body = _x_axis(scale, Axis(unit), left)
    for row, label in enumerate(labels):
        y, at = _TOP + pitch * row + pitch * 0.15, 0.0
        body.append(
            f'<text class="tick" text-anchor="end" x="{left - 6}" y="{y + pitch * 0.42:.1f}">{escape(label)}</text>'
        )
        for index, (name, values) in enumerate(parts.items()):
            x, width = scale.at(at), scale.at(at + values[row]) - scale.at(at)
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{pitch * 0.7:.1f}" '
                f'fill="var(--c{index % COLOURS})"><title>{escape(name)}: {values[row]:.4g}</title></rect>'
            )
            at += values[row]
        body.append(f'<text class="tick" x="{scale.at(at) + 4:.1f}" y="{y + pitch * 0.42:.1f}">{at:.3g}</text>')
    return _figure(title, body, list(parts))


def _scale(values: Sequence[float], is_log: bool, start: float, end: float) -> _Scale:
    if is_log:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        return _Scale(low, high if high > low else low * 10, start, end, True)
    low, high = min(values), max(values)
    return _Scale(low, high if high > low else low + 1, start, end, False)


def _path(series: Series, x: _Scale, y: _Scale) -> str:
    points = _thinned(series.points)
    pixels = [(x.at(a), y.at(b)) for a, b in points]
    steps = [f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}"]
    for a, b in pixels[1:]:
        steps.append(f"H{a:.1f}V{b:.1f}" if series.is_step else f"L{a:.1f} {b:.1f}")
    return "".join(steps)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return at most `_POINTS_MAX` of the points, evenly taken, first and last among them."""
    if len(points) <= _POINTS_MAX:
        return points
    step = (len(points) - 1) / (_POINTS_MAX - 1)
    return [points[round(i * step)] for i in range(_POINTS_MAX)]


def _frame(x: _Scale, y: _Scale, x_axis: Axis, y_axis: Axis) -> list[str]:
    body = _x_axis(x, x_axis, _LEFT)
    for tick in y.ticks():
        at = y.at(tick)
        body.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        body.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{at + 4:.1f}">{_short(tick)}</text>')
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    body.append(
        f'<text class="label" text-anchor="middle" transform="rotate(-90 12 {middle})" x="12" y="{middle}">'
        f"{escape(y_axis.label)}</text>"
    )
    return body


def _x_axis(x: _Scale, axis: Axis, left: float) -> list[str]:
    bottom = HEIGHT - _BOTTOM
    body = []
    for tick in x.ticks():
        at = x.at(tick)
        body.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        body.append(f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{bottom + 16}">{_short(tick)}</text>')
    body.append(f'<line class="axis" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (left + WIDTH - _RIGHT) / 2
    body.append(
        f'<text class="label" text-anchor="middle" x="{middle:.1f}" y="{HEIGHT - 8}">{escape(axis.label)}</text>'
    )
    return body


def _figure(title: str, body: Sequence[str], names: Sequence[str]) -> str:
    keys = "".join(
        f'<span><i style="background:var(--c{index % COLOURS})"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(body)}</svg><div class="key">{keys}</div></figure>'
    )


def _nice_step(raw: float) -> float:
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if raw <= step * power * 1.0001)


def _short(value: float) -> str:
    return f"{value:.6g}"
