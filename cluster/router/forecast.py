"""What a request will meet when its turn comes: the decode load at the end of its prefill, not that of now. Pure.

Judged by the present load, requests are let in while decode is idle and all end their prefill together, when it is
full; then nobody is let in until it is idle again (Mooncake, FAST 2025, section 7.3). So the load is predicted for the
moment at which the sequence would join.
"""

from cluster.router.admission import Forecast
from cluster.router.estimate import PairEstimate

_NEVER_S = 3600.0


def forecast(
    estimate: PairEstimate,
    output_tokens: float,
    wait_s: float,
    num_ahead: float,
    tpot_target_s: float | None,
    tokens_per_s: float,
) -> Forecast:
    """Return the forecast for a request.

    Args:
        estimate: of the request, if it began now, with the present load.
        output_tokens: that sequences produce.
        wait_s: until its turn.
        num_ahead: requests that go to the same decode worker while it waits.
        tpot_target_s: for which `relief_s` is reckoned.
        tokens_per_s: see Forecast.
    """
    decode, model = estimate.decode, estimate.decode.model
    joins_s = wait_s + estimate.first.ttft_s + estimate.exposed_s
    stay_s = max(estimate.then.tpot_s * output_tokens, 1e-9)
    # Sequences there now are at any point of their stay; of those that come meanwhile, only the latest are still there.
    left = decode.num_sequences * max(0.0, 1.0 - joins_s / stay_s)
    come = num_ahead * min(1.0, stay_s / max(joins_s, 1e-9))
    context = decode.used_tokens / max(1, decode.num_sequences) or output_tokens
    num_sequences = left + come + 1
    # Prompts that are prefilled on the decode worker itself stretch its steps.
    stretch_s = max(0.0, decode.backlog.total_s - joins_s) / max(1.0, output_tokens)
    tpot_s = model.decode_s(num_sequences, num_sequences * context) + stretch_s
    relief_s = 0.0
    if tpot_target_s is not None and tpot_s > tpot_target_s:
        room = (tpot_target_s - model.base_s) / (model.sequence_s + model.context_s * context)
        # As sequences end at an even pace, the batch has shrunk to what the target allows after this time.
        relief_s = _NEVER_S if room < 1 else stay_s * (1.0 - room / num_sequences)
    return Forecast(estimate.first.ttft_s, tpot_s, relief_s, tokens_per_s)
