"""From records to numbers: distributions, throughput, SLO attainment, goodput, cache hits, errors."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loadtest.records import RequestRecord, Slo


@dataclass(frozen=True, slots=True)
class Distribution:
    """Some numbers, in short. All zero when `count` is."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Mean parts of the time to the second token, over the requests whose server told; seconds.

    queue + prefill + network is the client's TTFT; transfer_exposed + first_decode lies between first and second token.
    """

    count: int
    queue_s: float
    prefill_s: float
    network_s: float
    transfer_exposed_s: float
    first_decode_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers."""

    requests: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    """First intended sending to last end."""
    ttft: Distribution
    ttft_intended: Distribution
    """TTFT counted from the intended sending: includes the client's own lag."""
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    send_lag: Distribution
    """How late the client sent; when this is not small the client was the bottleneck."""
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    slo_attainment: float
    """Share of all requests, failed ones included, that met both targets."""
    goodput_per_s: float
    cache_hit: float
    """Cached prompt tokens over prompt tokens, of completed requests."""
    breakdown: Breakdown
    decode_workers: int
    """How many answered anything; 0 when unknown."""
    load_imbalance: float
    """Most requests on one of these over their mean; 1 is even; 0 when unknown. Idle workers are not seen here."""

    def as_json(self) -> dict[str, Any]:
        """Return a tree of plain values."""
        return asdict(self)


def distribution(values: Iterable[float | None]) -> Distribution:
    """Return the distribution of the values that are there; percentiles interpolate linearly."""
    array = np.array([value for value in values if value is not None], dtype=np.float64)
    if not array.size:
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    return Distribution(array.size, float(array.mean()), float(p50), float(p90), float(p99), float(array.max()))


def summarize(records: Sequence[RequestRecord], slo: Slo) -> Summary:
    """Return the numbers of a run."""
    answered = [record for record in records if record.error is None]
    duration = _duration(records)
    met = sum(slo.is_met(record) for record in records)
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    per_s = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(records),
        completed=len(answered),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration,
        ttft=distribution(record.ttft_s for record in answered),
        ttft_intended=distribution(record.ttft_intended_s for record in answered),
        tpot=distribution(record.tpot_s for record in answered),
        itl=distribution(gap for record in answered for gap in record.gaps_s),
        e2e=distribution(record.e2e_s for record in answered),
        send_lag=distribution(record.sent_s - record.intended_s for record in records),
        requests_per_s=len(answered) * per_s,
        prompt_tokens_per_s=prompt_tokens * per_s,
        output_tokens_per_s=sum(record.output_tokens for record in answered) * per_s,
        slo_attainment=met / len(records) if records else 0.0,
        goodput_per_s=met * per_s,
        cache_hit=sum(record.cached_tokens for record in answered) / prompt_tokens if prompt_tokens else 0.0,
        breakdown=breakdown(answered),
        decode_workers=len({record.decode_worker for record in answered} - {None}),
        load_imbalance=_imbalance(answered),
    )


def breakdown(records: Iterable[RequestRecord]) -> Breakdown:
    """Return the mean parts of TTFT over the records whose server told them."""
    parts = [
        (s.queue_s, s.prefill_s, max(0.0, ttft - s.ttft_s), s.transfer_exposed_s, s.first_decode_s)
        for s, ttft in ((record.server, record.ttft_s) for record in records)
        if s is not None and ttft is not None
    ]
    if not parts:
        return Breakdown(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Breakdown(len(parts), *(float(mean) for mean in np.mean(np.array(parts), axis=0)))


def _duration(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.end_s for record in records) - min(record.intended_s for record in records)


def _imbalance(records: Sequence[RequestRecord]) -> float:
    counts = Counter(record.decode_worker for record in records if record.decode_worker is not None)
    return max(counts.values()) * len(counts) / counts.total() if counts else 0.0
