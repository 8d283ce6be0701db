"""What workers say is what the router knows."""

from baton_pb.v1 import worker_pb2
from cluster.router.fetch_model import FetchTotals
from cluster.router.messages import facts_from_pb, load_from_pb


def test_a_handshake_tells_the_limits_of_a_workers_steps_and_how_large_its_blocks_are() -> None:
    limits = worker_pb2.WorkerLimits(running_max=3, waiting_max=5, token_budget=7)

    facts = facts_from_pb(worker_pb2.HandshakeReply(limits=limits, block_bytes=9))

    assert (facts.running_max, facts.token_budget, facts.block_bytes) == (3, 7, 9)


def test_a_report_tells_what_was_fetched_and_what_failed() -> None:
    fetches = worker_pb2.FetchTotals(fetches=1, tokens=2, seconds=3.0, failed_tokens=4, failed_seconds=5.0)

    load = load_from_pb(worker_pb2.LoadReport(fetches=fetches))

    assert load.fetches == FetchTotals(1, 2, 3.0, 4, 5.0)
