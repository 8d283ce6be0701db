"""Every metric: its name, unit and buckets, defined once. What is counted where is the business of its owner."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its name ends with its unit."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""


# Powers of two from 1 ms (5 ms) on: a doubling is what one acts upon.
_ITL_BUCKETS = tuple(0.001 * 2.0**power for power in range(13))
_TTFT_BUCKETS = tuple(0.005 * 2.0**power for power in range(15))

REQUESTS = Metric("baton_gateway_requests_total", "counter", "Requests to the cluster, by both APIs; n counts n.")
RUNNING = Metric("baton_gateway_running_requests", "gauge", "Requests that run now.")
QUEUED = Metric("baton_gateway_queued_requests", "gauge", "Of the running requests: not placed yet.")
ERRORS = Metric("baton_gateway_errors_total", "counter", "Requests that ended with an error, by gRPC code.", ("code",))
RETRIES = Metric("baton_gateway_retries_total", "counter", "Attempts on other workers after one had failed.")
ABANDONED = Metric("baton_gateway_abandoned_total", "counter", "Requests whose client left before their end.")
PROMPT_TOKENS = Metric("baton_gateway_prompt_tokens_total", "counter", "Prompt tokens of finished requests.")
CACHED_TOKENS = Metric("baton_gateway_cached_tokens_total", "counter", "Of these: reused instead of computed.")
OUTPUT_TOKENS = Metric("baton_gateway_output_tokens_total", "counter", "Tokens handed to clients.")
TTFT = Metric("baton_gateway_ttft_seconds", "histogram", "Request received -> first token.", (), _TTFT_BUCKETS)
PREDICTION = Metric(
    "baton_gateway_ttft_prediction_ratio",
    "histogram",
    "Observed over predicted TTFT, both from the placement on.",
    (),
    tuple(2.0**power for power in range(-4, 6)),
)
ITL = Metric("baton_gateway_itl_seconds", "histogram", "Gap between two tokens of a stream.", (), _ITL_BUCKETS)
E2E = Metric("baton_gateway_e2e_seconds", "histogram", "Request received -> last token.", (), _TTFT_BUCKETS)
FINISHED = Metric(
    "baton_gateway_finished_total", "counter", "Requests that ended well: stop, length, cancelled.", ("reason",)
)
HTTP_RESPONSES = Metric(
    "baton_gateway_http_responses_total", "counter", "HTTP responses, by path and code.", ("path", "code")
)
HTTP_CONNECTIONS = Metric("baton_gateway_http_connections", "gauge", "Open HTTP connections.")
DEGRADED = Metric(
    "baton_degraded", "gauge", "Ways in which the cluster works less well than configured; `baton status` names them."
)
LOCAL_PREFILLS = Metric(
    "baton_router_local_prefill_fallbacks_total",
    "counter",
    "Prompts that decode workers prefilled because no prefill worker could be used.",
)

_PAIR = ("worker", "peer", "transport")
TRANSFER_BYTES = Metric("baton_transfer_bytes_total", "counter", "KV that a worker sent and received.", _PAIR)
TRANSFER_SECONDS = Metric("baton_transfer_seconds_total", "counter", "Duration of its transfers, added up.", _PAIR)
TRANSFER_EXPOSED = Metric(
    "baton_transfer_exposed_seconds_total", "counter", "Of that, as a sender: what no computation hid.", _PAIR
)
TRANSFER_REFUSALS = Metric("baton_transfer_refusals_total", "counter", "Frames of the peer that it refused.", _PAIR)
TRANSFER_FALLBACKS = Metric(
    "baton_transfer_fallbacks_total",
    "counter",
    "Connections that are of a slower kind, or slower, than expected.",
    _PAIR,
)

TENANT_REQUESTS = Metric("baton_tenant_requests_total", "counter", "Requests of a tenant; n counts n.", ("tenant",))
TENANT_RUNNING = Metric("baton_tenant_running_requests", "gauge", "Of these: running now.", ("tenant",))
TENANT_PROMPT_TOKENS = Metric(
    "baton_tenant_prompt_tokens_total", "counter", "Prompt tokens of a tenant's finished requests.", ("tenant",)
)
TENANT_CACHED_TOKENS = Metric(
    "baton_tenant_cached_tokens_total", "counter", "Of these: reused instead of computed.", ("tenant",)
)
TENANT_OUTPUT_TOKENS = Metric(
    "baton_tenant_output_tokens_total", "counter", "Tokens handed to a tenant's clients.", ("tenant",)
)
TENANT_DEVICE_SECONDS = Metric(
    "baton_tenant_device_seconds_total",
    "counter",
    "Share of a tenant's finished requests in the seconds that devices computed.",
    ("tenant", "phase"),
)
TENANT_COST = Metric(
    "baton_tenant_cost_total", "counter", "Cost of a tenant's finished requests.", ("tenant", "currency")
)
TENANT_REFUSALS = Metric(
    "baton_tenant_refusals_total", "counter", "Calls refused by a rule of the tenant's own.", ("tenant", "rule")
)

# By vLLM's names, for dashboards and autoscalers that were written for it: https://docs.vllm.ai, "Production metrics".
_MODEL = ("model_name",)
VLLM_RUNNING = Metric("vllm:num_requests_running", "gauge", "Requests that have their workers.", _MODEL)
VLLM_WAITING = Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for theirs.", _MODEL)
VLLM_USAGES = tuple(
    Metric(f"vllm:{name}_usage_perc", "gauge", "Share of the decode workers' blocks in use, 0 to 1.", _MODEL)
    for name in ("kv_cache", "gpu_cache")
)
VLLM_PREFIX_QUERIES = Metric("vllm:prefix_cache_queries_total", "counter", "Prompt tokens that were looked up.", _MODEL)
VLLM_PREFIX_HITS = Metric("vllm:prefix_cache_hits_total", "counter", "Of these: found.", _MODEL)
VLLM_PROMPT_TOKENS = Metric("vllm:prompt_tokens_total", "counter", PROMPT_TOKENS.help, _MODEL)
VLLM_OUTPUT_TOKENS = Metric("vllm:generation_tokens_total", "counter", OUTPUT_TOKENS.help, _MODEL)
VLLM_TTFT = Metric("vllm:time_to_first_token_seconds", "histogram", TTFT.help, _MODEL, _TTFT_BUCKETS)
VLLM_ITLS = tuple(
    Metric(f"vllm:{name}_seconds", "histogram", ITL.help, _MODEL, _ITL_BUCKETS)
    for name in ("inter_token_latency", "time_per_output_token")
)
VLLM_E2E = Metric("vllm:e2e_request_latency_seconds", "histogram", E2E.help, _MODEL, _TTFT_BUCKETS)
VLLM_SUCCESS = Metric(
    "vllm:request_success_total", "counter", "Requests that ended well.", (*_MODEL, "finished_reason")
)


class Histogram:
    """Counts of one histogram's buckets. Owned by one loop."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.counts = [0] * (len(metric.buckets) + 1)
        """One for each bucket, the last one for what is above them all."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.metric.buckets, value)] += times
        self.sum += value * times


def exposition(samples: Sequence["Sample"]) -> str:
    """Return samples in Prometheus' text format 0.0.4; those of one metric must be neighbours."""
    lines: list[str] = []
    before = None
    for sample in samples:
        metric = sample.metric
        if metric is not before:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            before = metric
        lines += _lines(sample)
    return "\n".join([*lines, ""])


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric's value now, for one set of label values."""

    metric: Metric
    value: float | Histogram
    labels: tuple[str, ...] = ()


def _lines(sample: Sample) -> list[str]:
    name, value = sample.metric.name, sample.value
    labels = dict(zip(sample.metric.labels, sample.labels, strict=True))
    if not isinstance(value, Histogram):
        return [
            f"{name}{_braces(labels)} {value!r}" if isinstance(value, float) else f"{name}{_braces(labels)} {value}"
        ]
    lines, below = [], 0
    for bound, count in zip([*(f"{bound:g}" for bound in sample.metric.buckets), "+Inf"], value.counts, strict=True):
        below += count
        lines.append(f"{name}_bucket{_braces({**labels, 'le': bound})} {below}")
    return [*lines, f"{name}_sum{_braces(labels)} {value.sum}", f"{name}_count{_braces(labels)} {below}"]


def _braces(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
