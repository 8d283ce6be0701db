"""The table of `make bench-gateway`: what was measured of each server -> rows beside the peers'."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from common.errors import BatonError
from loadtest.bench.common import BenchRow
from loadtest.bench.gateway_load import Samples

TTFT_GOAL_MS, TOKENS_GOAL = 2.0, 20_000.0


class Shape(NamedTuple):
    """A load."""

    streams: int
    max_tokens: int
    step_s: float
    """Time between two tokens of a stream."""

    @property
    def life_s(self) -> float:
        """How long an answer takes that waits for nothing else."""
        return (self.max_tokens - 1) * self.step_s


PACED = (Shape(1, 2, 0.05), Shape(64, 20, 0.05), Shape(256, 20, 0.05))
SHORT = (Shape(1, 1, 1.0), Shape(64, 1, 1.0), Shape(256, 1, 1.0))
LONG = (Shape(64, 400, 0.002), Shape(256, 400, 0.005))


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one server."""

    samples: Samples
    cpu_s: float
    """Of the server's processes."""

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens for each second of processor time."""
        return self.samples.num_tokens / self.cpu_s

    @property
    def requests_per_cpu_s(self) -> float:
        """Requests for each second of processor time."""
        return len(self.samples.ttft_s) / self.cpu_s

    def with_more(self, other: "Measured") -> "Measured":
        """Return both together."""
        return Measured(self.samples.with_more(other.samples), self.cpu_s + other.cpu_s)


Found = dict[str, Measured | str]
"""What each server showed, or why it showed nothing."""


def ttft_rows(kind: str, shape: Shape, found: Found) -> list[BenchRow]:
    """Return rows of the time to the first token, less that without a server between."""
    rows = []
    ours, direct = _of(found, "ours"), _of(found, "direct")
    num_requests = len(ours.samples.ttft_s) + ours.samples.num_early
    for percentile in (50, 99):
        base = direct.samples.ttft_ms(percentile)
        added = ours.samples.ttft_ms(percentile) - base
        goal = TTFT_GOAL_MS if shape.streams == 64 and percentile == 50 else None
        note = (
            f"{base:.2f} ms direct; {len(ours.samples.ttft_s)} requests of {shape.max_tokens} tokens "
            f"{shape.step_s:g} s apart; {ours.cpu_s / num_requests * 1000:.1f} ms of CPU for each"
        )
        label = f"{kind}: added TTFT p{percentile}, {shape.streams} streams"
        value = partial(_added_ms, percentile=percentile, base=base)
        rows += _with_peers(label, added, "ms", False, found, value, goal, note)
    return rows


def _added_ms(measured: Measured, percentile: float, base: float) -> float:
    return measured.samples.ttft_ms(percentile) - base


def request_rows(kind: str, shape: Shape, found: Found) -> list[BenchRow]:
    """Return the row of short requests."""
    ours, direct = _of(found, "ours"), _of(found, "direct")
    note = f"{ours.requests_per_cpu_s:.0f} for each CPU second; direct {direct.samples.requests_per_s:.0f}"
    label = f"{kind}: requests of one token, {shape.streams} at once"
    return _with_peers(
        label, ours.samples.requests_per_s, "1/s", True, found, lambda m: m.samples.requests_per_s, None, note
    )


def token_rows(kind: str, shape: Shape, found: Found) -> list[BenchRow]:
    """Return the row of tokens relayed."""
    ours, direct = _of(found, "ours"), _of(found, "direct")
    offered = shape.streams / shape.step_s
    note = (
        f"{ours.samples.tokens_per_s:.0f}/s seen, {ours.cpu_s / ours.samples.wall_s:.0%} of the core busy, "
        f"{offered:.0f}/s possible; direct {direct.samples.tokens_per_s:.0f}/s"
    )
    label = f"{kind}: tokens for each CPU second, {shape.streams} streams"
    goal = TOKENS_GOAL if kind == "gRPC" else None
    return _with_peers(label, ours.tokens_per_cpu_s, "1/s", True, found, lambda m: m.tokens_per_cpu_s, goal, note)


def _with_peers(
    label: str,
    ours: float,
    unit: str,
    is_higher_better: bool,
    found: Found,
    value: Callable[[Measured], float],
    goal: float | None,
    note: str,
) -> list[BenchRow]:
    """Return one row for each peer, or one without a peer."""
    peers = [name for name in found if name not in ("ours", "direct")]
    if not peers:
        return [BenchRow(label, ours, unit, is_higher_better, goal=goal, note=note)]
    rows = []
    for name in peers:
        peer = found[name]
        seen, why = (value(peer), note) if isinstance(peer, Measured) else (None, f"{note}; {name}: {peer}")
        rows.append(BenchRow(label, ours, unit, is_higher_better, seen, name, goal, note=why))
    return rows


def _of(found: Found, name: str) -> Measured:
    measured = found[name]
    if isinstance(measured, str):
        raise BatonError(f"{name}: {measured}")
    return measured
