"""What the gateway measures of its requests, whichever API they came by, and its page for Prometheus."""

from collections import Counter
from collections.abc import Callable, Sequence

from baton_pb.v1 import common_pb2, router_pb2, worker_pb2
from cluster.gateway.counts import Counts
from cluster.gateway.degraded import degraded
from cluster.gateway.progress import Delta
from cluster.tenants.quotas import TenantUse, Uses
from common import telemetry
from common.clock import Clock
from common.telemetry import Histogram, Metric, Sample, exposition

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_TOOL_CALLS: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_VLLM_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}
_DECODING = (worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_BOTH)


class Metrics:
    """Owned by the gateway's loop; plain functions."""

    def __init__(self, model_id: str, counts: Counts, uses: Uses, clock: Clock) -> None:
        self.ttft = Histogram(telemetry.TTFT)
        self.itl = Histogram(telemetry.ITL)
        self.e2e = Histogram(telemetry.E2E)
        self._prediction = Histogram(telemetry.PREDICTION)
        self._finished: Counter[str] = Counter()
        self._model_id = model_id
        self.http_responses: Counter[tuple[str, int]] = Counter()
        """By path and code."""
        self.http_connections = 0
        self._counts = counts
        self._uses = uses
        self._clock = clock
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._output_tokens = 0

    def stream(self, received_s: float) -> "StreamMetrics":
        """Measure one request that arrived at `received_s`."""
        return StreamMetrics(self, received_s, self._clock)

    def took(self, delta: Delta) -> None:
        """Count a delta's tokens."""
        self._output_tokens += len(delta.token_ids)
        if delta.finished is not None:
            self._prompt_tokens += delta.finished.usage.prompt_tokens
            self._cached_tokens += delta.finished.usage.cached_tokens
            self._finished[_REASONS.get(delta.finished.reason, "stop")] += 1
            self.e2e.observe(delta.finished.timing.total_s)

    def predicted(self, predicted_s: float, observed_s: float) -> None:
        """Compare a first token's time with what was predicted; 0: nothing was."""
        if predicted_s > 0:
            self._prediction.observe(observed_s / predicted_s)

    @property
    def running(self) -> int:
        """Requests that run now."""
        return self._counts.running

    def page(self, router: router_pb2.RouterStatus) -> str:
        """Return everything in Prometheus' text format, with what the router says."""
        counts = self._counts
        errors = sorted(counts.errors.items())
        responses = sorted(self.http_responses.items())
        return exposition(
            [
                Sample(telemetry.REQUESTS, counts.requests_total),
                Sample(telemetry.RUNNING, counts.running),
                Sample(telemetry.QUEUED, counts.queued),
                *(Sample(telemetry.ERRORS, number, (code,)) for code, number in errors),
                Sample(telemetry.RETRIES, counts.counters["retries_total"]),
                Sample(telemetry.ABANDONED, counts.counters["abandoned_total"]),
                Sample(telemetry.PROMPT_TOKENS, self._prompt_tokens),
                Sample(telemetry.CACHED_TOKENS, self._cached_tokens),
                Sample(telemetry.OUTPUT_TOKENS, self._output_tokens),
                Sample(telemetry.TTFT, self.ttft),
                Sample(telemetry.PREDICTION, self._prediction),
                Sample(telemetry.ITL, self.itl),
                Sample(telemetry.E2E, self.e2e),
                *(Sample(telemetry.FINISHED, number, (reason,)) for reason, number in sorted(self._finished.items())),
                *(Sample(telemetry.HTTP_RESPONSES, number, (path, str(code))) for (path, code), number in responses),
                Sample(telemetry.HTTP_CONNECTIONS, self.http_connections),
                Sample(telemetry.DEGRADED, len(degraded(router))),
                Sample(telemetry.LOCAL_PREFILLS, router.counters.get("local_prefill_fallback", 0)),
                *_transfer_samples(router),
                *_tenant_samples(self._uses.all()),
                *self._vllm_samples(router),
            ]
        )

    def _vllm_samples(self, router: router_pb2.RouterStatus) -> list[Sample]:
        """Return what has names of our own already, by vLLM's. Without workers nobody knows how full pools are."""
        counts = self._counts
        loads = [worker.load for worker in router.workers if worker.role in _DECODING]
        num_blocks = sum(load.blocks_free + load.blocks_used + load.blocks_kept for load in loads)
        usage = sum(load.blocks_used for load in loads) / max(1, num_blocks)
        values: list[tuple[Metric, float | Histogram]] = [
            (telemetry.VLLM_RUNNING, counts.running - counts.queued),
            (telemetry.VLLM_WAITING, counts.queued),
            *((metric, usage) for metric in telemetry.VLLM_USAGES if num_blocks),
            (telemetry.VLLM_PREFIX_QUERIES, self._prompt_tokens),
            (telemetry.VLLM_PREFIX_HITS, self._cached_tokens),
            (telemetry.VLLM_PROMPT_TOKENS, self._prompt_tokens),
            (telemetry.VLLM_OUTPUT_TOKENS, self._output_tokens),
            (telemetry.VLLM_TTFT, self.ttft),
            *((metric, self.itl) for metric in telemetry.VLLM_ITLS),
            (telemetry.VLLM_E2E, self.e2e),
        ]
        model = self._model_id
        return [
            *(Sample(metric, value, (model,)) for metric, value in values),
            *(
                Sample(telemetry.VLLM_SUCCESS, self._finished[ours], (model, its))
                for its, ours in _VLLM_REASONS.items()
            ),
        ]


def _transfer_samples(router: router_pb2.RouterStatus) -> list[Sample]:
    counted: dict[Metric, Callable[[worker_pb2.TransferStats], float]] = {
        telemetry.TRANSFER_BYTES: lambda stats: stats.bytes,
        telemetry.TRANSFER_SECONDS: lambda stats: stats.seconds,
        telemetry.TRANSFER_EXPOSED: lambda stats: stats.exposed_seconds,
        telemetry.TRANSFER_REFUSALS: lambda stats: stats.refusals,
        telemetry.TRANSFER_FALLBACKS: lambda stats: stats.fallbacks,
    }
    pairs = [
        ((worker.worker_id, stats.peer_worker_id, stats.transport), stats)
        for worker in router.workers
        for stats in worker.load.transfer_stats
    ]
    return [Sample(metric, value(stats), pair) for metric, value in counted.items() for pair, stats in pairs]


def _tenant_samples(uses: Sequence[TenantUse]) -> list[Sample]:
    counted: dict[Metric, Callable[[TenantUse], float]] = {
        telemetry.TENANT_REQUESTS: lambda use: use.requests_total,
        telemetry.TENANT_RUNNING: lambda use: use.running,
        telemetry.TENANT_PROMPT_TOKENS: lambda use: use.prompt_tokens,
        telemetry.TENANT_CACHED_TOKENS: lambda use: use.cached_tokens,
        telemetry.TENANT_OUTPUT_TOKENS: lambda use: use.output_tokens,
    }
    samples = [Sample(metric, value(use), (use.name,)) for metric, value in counted.items() for use in uses]
    seconds = [
        Sample(telemetry.TENANT_DEVICE_SECONDS, float(value), (use.name, phase))
        for use in uses
        for phase, value in (("prefill", use.prefill_device_s), ("decode", use.decode_device_s))
    ]
    costs = [
        Sample(telemetry.TENANT_COST, float(cost), (use.name, currency))
        for use in uses
        for currency, cost in sorted(use.cost.items())
    ]
    refusals = [
        Sample(telemetry.TENANT_REFUSALS, number, (use.name, rule))
        for use in uses
        for rule, number in sorted(use.refusals.items())
    ]
    return [*samples, *seconds, *costs, *refusals]


class StreamMetrics:
    """One request's times."""

    def __init__(self, metrics: Metrics, received_s: float, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last_s = received_s
        self._has_token = False

    def took(self, delta: Delta) -> None:
        """Measure a delta. Tokens that come together have no gap between them."""
        self._metrics.took(delta)
        count = len(delta.token_ids)
        if not count:
            return
        now = self._clock.now()
        gap_s, self._last_s = now - self._last_s, now
        (self._metrics.itl if self._has_token else self._metrics.ttft).observe(gap_s)
        self._has_token = True
        if count > 1:
            self._metrics.itl.observe(0.0, count - 1)
