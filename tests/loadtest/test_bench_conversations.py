"""The table of conversations: medians of rounds beside those of round_robin, and a goal for our own policy."""

from loadtest.bench.conversations import rows_of
from loadtest.metrics import Summary, summarize
from loadtest.records import RequestRecord, Slo

SLO = Slo(2.0, 0.2)


def round_with(ttft_s: float) -> Summary:
    return summarize([RequestRecord("r", 0, 0, 0.0, 0.0, ttft_s, ttft_s + 0.1, ttft_s + 0.1, 8, 2)], SLO)


def test_the_goal_of_cost_is_the_median_of_round_robin() -> None:
    rounds = {
        "round_robin": [round_with(ttft_s) for ttft_s in (0.4, 0.3, 0.9)],
        "cost": [round_with(ttft_s) for ttft_s in (0.2, 0.3, 0.1)],
    }

    rows = {row.name: row for policy in rounds for row in rows_of(policy, rounds)}

    ours, peer = rows["cost: mean TTFT"], rows["round_robin: mean TTFT"]
    assert (round(ours.ours), round(peer.ours)) == (200, 400)
    assert ours.goal == ours.peer == peer.ours
    assert ours.met
    assert round(ours.spread or 0.0, 2) == 1.0
    assert {name for name, row in rows.items() if row.goal is not None} == {"cost: mean TTFT"}
