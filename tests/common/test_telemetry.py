"""The metrics page is what Prometheus reads: cumulative buckets, escaped labels, one header for each metric."""

from prometheus_client.parser import text_string_to_metric_families

from common import telemetry
from common.telemetry import Histogram, Metric, Sample, exposition


def test_prometheus_reads_back_what_was_observed() -> None:
    times = Histogram(Metric("a_seconds", "histogram", "Some times.", (), (0.1, 1.0)))
    times.observe(0.1)
    times.observe(0.5, times=3)
    times.observe(7.0)
    errors = Metric("e_total", "counter", "Errors.", ("code",))

    page = exposition([Sample(times.metric, times), Sample(errors, 2, ('a"\\\n',)), Sample(errors, 3, ("b",))])

    first, second = text_string_to_metric_families(page)
    values = {(s.name, s.labels.get("le")): s.value for s in first.samples}
    assert values == {
        ("a_seconds_bucket", "0.1"): 1,
        ("a_seconds_bucket", "1"): 4,
        ("a_seconds_bucket", "+Inf"): 5,
        ("a_seconds_sum", None): 8.6,
        ("a_seconds_count", None): 5,
    }
    assert {s.labels["code"]: s.value for s in second.samples} == {'a"\\\n': 2, "b": 3}


def test_names_end_with_their_unit_and_are_unique() -> None:
    metrics = [value for value in vars(telemetry).values() if isinstance(value, Metric)]

    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.name.startswith("vllm:" if metric.labels[:1] == ("model_name",) else "baton_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith(("_seconds", "_ratio")) == (metric.kind == "histogram")
