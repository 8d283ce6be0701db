"""What a request costs, by the prices of the configuration."""

from baton_pb.v1 import common_pb2
from common.config_doors import PricesConfig

_MILLION = 1_000_000.0
_HOUR_S = 3600.0


def add_cost(usage: common_pb2.Usage, prices: PricesConfig) -> None:
    """Write the cost into a usage; nothing, where there are no prices."""
    if not prices.are_set:
        return
    tokens = (
        (usage.prompt_tokens - usage.cached_tokens) * prices.prompt_tokens
        + usage.cached_tokens * prices.cached_tokens
        + usage.output_tokens * prices.output_tokens
    )
    device_s = usage.prefill_device_s + usage.decode_device_s
    usage.cost = tokens / _MILLION + device_s / _HOUR_S * prices.device_hours
    usage.currency = prices.currency
