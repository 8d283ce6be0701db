"""A request costs what the prices say of its tokens and its share of devices; without prices nothing is said."""

from pathlib import Path

import pytest

from baton_pb.v1 import common_pb2
from cluster.gateway.cost import add_cost
from common.config_doors import PricesConfig
from tests.cluster.fake_cluster import fake_cluster, request, run
from tests.cluster.gateway.http.wire import get, post

PRICES = PricesConfig(currency="EUR", prompt_tokens=2.0, cached_tokens=0.5, output_tokens=8.0, device_hours=3.6)


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        pytest.param(common_pb2.Usage(prompt_tokens=1_000_000), 2.0, id="prompt"),
        pytest.param(common_pb2.Usage(prompt_tokens=1_000_000, cached_tokens=1_000_000), 0.5, id="cached"),
        pytest.param(common_pb2.Usage(output_tokens=500_000), 4.0, id="output"),
        pytest.param(common_pb2.Usage(prefill_device_s=600, decode_device_s=400), 1.0, id="device"),
        pytest.param(common_pb2.Usage(), 0.0, id="nothing"),
    ],
)
def test_each_part_has_its_price(usage: common_pb2.Usage, cost: float) -> None:
    add_cost(usage, PRICES)

    assert usage.cost == pytest.approx(cost)
    assert usage.currency == "EUR"


def test_without_prices_there_is_no_cost() -> None:
    usage = common_pb2.Usage(prompt_tokens=5)

    add_cost(usage, PricesConfig())

    assert not usage.HasField("cost")


def test_both_faces_and_the_tenants_counters_tell_the_cost(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, prices=PRICES) as cluster:
            usage = (await cluster.ask(request("hello", max_tokens=3))).finished.usage
            body = (await post(cluster, "/v1/completions", {"prompt": "hello", "max_tokens": 3})).json["usage"]
            page = (await get(cluster, "/metrics")).body.decode()

            tokens = (usage.prompt_tokens - usage.cached_tokens) * 2.0 + usage.cached_tokens * 0.5 + 3 * 8.0
            assert usage.cost == pytest.approx(tokens / 1e6)
            assert body["cost"] == {"amount": pytest.approx(usage.cost), "currency": "EUR"}
            assert body["device_seconds"].keys() == {"prefill", "decode"}
            [line] = [line for line in page.splitlines() if line.startswith("baton_tenant_cost_total{")]
            assert line.startswith('baton_tenant_cost_total{tenant="anonymous",currency="EUR"} ')
            assert float(line.rpartition(" ")[2]) == pytest.approx(2 * usage.cost)

    run(scenario())
