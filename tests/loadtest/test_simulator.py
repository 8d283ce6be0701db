"""A simulation is the same each time, leaves nothing behind, and its times follow from the cost model."""

import gc
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.errors import ConfigError
from loadtest.cli import app
from loadtest.execute import Plan
from loadtest.goodput import GoodputSearch
from loadtest.metrics import summarize
from loadtest.records import RequestRecord, Slo
from loadtest.runner import RunOptions
from loadtest.simulator.cluster import ClusterShape
from loadtest.simulator.profile import Profile, load_profile
from loadtest.simulator.simulate import Simulation, simulate, simulated_goodput
from loadtest.workload import parse_arrival, parse_workload

PROFILE = load_profile("two-core-cpu")
SLO = Slo(2.0, 0.1)


def plan(workload: str, arrival: str = "poisson:rate=1", sessions: int = 30, seed: int = 0) -> Plan:
    return Plan(parse_workload(workload), parse_arrival(arrival), sessions, SLO, RunOptions(seed=seed))


def records(what: Plan, shape: ClusterShape = ClusterShape(), profile: Profile = PROFILE) -> list[RequestRecord]:  # noqa: B008 - frozen
    return Simulation(what, profile, shape).run()


SHAPES = st.builds(
    ClusterShape,
    prefill=st.integers(0, 2),
    decode=st.integers(1, 2),
    both=st.integers(0, 2),
    policy=st.sampled_from(["round_robin", "least_loaded", "cost"]),
)
WORKLOADS = st.sampled_from(
    [
        "synthetic:prompt_tokens=300,output_tokens=20,spread=0.9,prefixes=2,prefix_tokens=24",
        "synthetic:prompt_tokens=40,output_tokens=1",
        "conversation:turns=3,think_s=1,spread=0.5,output_tokens=30",
    ]
)
ARRIVALS = st.sampled_from(["poisson:rate=0.5", "gamma:rate=20,burstiness=0.1", "constant:rate=1000", "closed:users=3"])


@given(WORKLOADS, ARRIVALS, SHAPES, st.integers(0, 1000), st.sampled_from([80, 1456]), st.sampled_from([3, 256]))
@settings(max_examples=40)
def test_any_simulation_ends_with_every_request_accounted_for_and_nothing_left(
    workload: str, arrival: str, shape: ClusterShape, seed: int, pool_blocks: int, waiting_max: int
) -> None:
    profile = PROFILE.model_copy(update={"pool_blocks": pool_blocks, "waiting_max": waiting_max})

    ended = records(plan(workload, arrival, 25, seed), shape, profile)  # asserts by itself that the cluster is idle

    assert {record.session for record in ended} == set(range(25))
    for record in ended:
        if record.error is not None:
            assert record.error == "OverloadedError"
            continue
        assert record.server is not None
        assert record.ttft_s is not None
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        assert record.server.queue_s + record.server.prefill_s == pytest.approx(record.ttft_s)
        assert sum(record.gaps_s) == pytest.approx(record.last_token_s - record.first_token_s)
        assert len(record.gaps_s) == record.output_tokens - 1
        assert all(gap > 0 for gap in record.gaps_s)
        assert record.server.transfer_exposed_s >= 0
        assert 0 <= record.cached_tokens < record.prompt_tokens


def test_the_same_seed_gives_the_same_simulation() -> None:
    what = plan("conversation:turns=3,spread=0.3", "poisson:rate=2")
    shape = ClusterShape(prefill=2, decode=2)

    assert records(what, shape) == records(what, shape)
    assert records(what, shape) != records(plan("conversation:turns=3,spread=0.3", "poisson:rate=2", seed=1), shape)


def test_a_single_requests_times_are_the_cost_models() -> None:
    step, hop = PROFILE.step, PROFILE.hop_s

    (record,) = records(plan("synthetic:prompt_tokens=500,output_tokens=3", "constant:rate=1", 1))

    prefill = step.base_s + step.prefill_s(500, 0)
    decode = [step.base_s + step.decode_s(1, context) for context in (501, 502)]
    push = 500 * PROFILE.kv_bytes_per_token / PROFILE.link.bytes_per_s + PROFILE.link.latency_s
    assert record.ttft_s == pytest.approx(prefill + 6 * hop)
    assert record.gaps_s == pytest.approx([push + decode[0], decode[1]])


def test_a_long_prompt_is_pushed_while_it_is_prefilled() -> None:
    (record,) = records(plan("synthetic:prompt_tokens=4096,output_tokens=2", "constant:rate=1", 1))

    assert record.server is not None
    last_chunk = 512 * PROFILE.kv_bytes_per_token / PROFILE.link.bytes_per_s + PROFILE.link.latency_s
    assert record.server.transfer_exposed_s == pytest.approx(last_chunk)


def test_prefills_delay_the_tokens_of_a_colocated_worker_but_not_of_a_decode_worker() -> None:
    what = plan("synthetic:prompt_tokens=1500,output_tokens=60,spread=0.3", "poisson:rate=0.2", 40)

    colocated = summarize(records(what, ClusterShape(prefill=0, decode=0, both=2)), SLO)
    apart = summarize(records(what, ClusterShape(prefill=1, decode=1)), SLO)

    assert apart.itl.p99 < colocated.itl.p99 / 3


def test_a_cache_aware_policy_serves_conversations_that_share_nothing_sooner_than_round_robin() -> None:
    what = plan("conversation:turns=6,user_tokens=200,system_tokens=0", "poisson:rate=0.2", 40)

    aware, blind = (
        summarize(records(what, ClusterShape(prefill=4, decode=4, policy=policy)), SLO)
        for policy in ("prefix", "round_robin")
    )

    assert aware.cache_hit > blind.cache_hit
    assert aware.ttft.mean < blind.ttft.mean


def test_a_second_turn_finds_the_first_ones_prompt_and_answer() -> None:
    what = plan("conversation:turns=2,system_tokens=64,user_tokens=64,output_tokens=65", "closed:users=1", 1)

    first, second = records(what, ClusterShape(prefill=0, decode=0, both=1))

    assert first.cached_tokens == 0
    assert second.prompt_tokens == 64 + 64 + 65 + 64
    assert second.cached_tokens == 192


def test_a_prefill_worker_fetches_the_answer_before_from_the_decode_worker_that_wrote_it() -> None:
    what = plan("conversation:turns=2,system_tokens=64,user_tokens=64,output_tokens=65", "closed:users=1", 1)

    second = {policy: records(what, ClusterShape(policy=policy))[1] for policy in ("cost", "least_loaded")}

    assert second["least_loaded"].cached_tokens == 128
    assert second["cost"].prefill_worker == "prefill-0"
    assert second["cost"].cached_tokens == 192


def test_behind_a_link_so_slow_that_no_fetch_succeeds_few_prompts_lose_the_time_of_an_attempt() -> None:
    what = plan("synthetic:prompt_tokens=1100,output_tokens=30,prefixes=40,prefix_tokens=1000", "closed:users=4", 160)
    profile = PROFILE.model_copy(update={"link": PROFILE.link.model_copy(update={"bytes_per_s": 1e6})})
    simulation = Simulation(what, profile, ClusterShape(prefill=0, decode=0, both=3))
    simulation.run()

    fetches = [row.load.fetches for row in simulation.cluster.router.workers]
    assert sum(each.fetches for each in fetches) == 0
    assert 1 <= sum(each.failed_seconds for each in fetches) / 5.0 <= 8


def test_requests_wait_at_the_router_and_overload_is_refused_there() -> None:
    burst = plan("synthetic:prompt_tokens=500,output_tokens=4", "constant:rate=1000", 1500)

    ended = records(burst)

    refused = [record for record in ended if record.error is not None]
    assert {record.error for record in refused} == {"OverloadedError"}
    assert len(ended) - len(refused) >= 300  # what is drained in the longest wait, at two thirds of a second each


def test_with_targets_the_answered_ones_come_near_them_and_without_few_do() -> None:
    crowd = plan("synthetic:prompt_tokens=500,output_tokens=30", "poisson:rate=4", 200)
    asking = replace(crowd, options=replace(crowd.options, targets=SLO))

    near = {
        name: [SLO.is_met(record, scale=1.3) for record in records(what) if record.error is None]
        for name, what in (("all", crowd), ("asking", asking))
    }

    # A first token comes at the end of a step, half the target here; and the first few have nothing to learn from.
    assert sum(near["asking"]) >= 0.9 * len(near["asking"])
    assert sum(near["asking"]) > 5 * sum(near["all"])


def test_service_recovers_within_ten_seconds_after_an_overload_with_targets() -> None:
    def flood(at: float, count: int, every: float) -> str:
        lines = [
            f'{{"timestamp": {round(1000 * (at + number * every))}, "input_length": 500, "output_length": 10, '
            f'"hash_ids": [{round(1000 * at) + number}]}}'
            for number in range(count)
        ]
        return "\n".join(lines) + "\n"

    with NamedTemporaryFile("w", suffix=".jsonl") as trace:
        trace.write(flood(0.0, 400, 0.05) + flood(30.0, 10, 2.0))
        trace.flush()
        options = RunOptions(targets=SLO)
        what = Plan(parse_workload(f"mooncake:path={trace.name}"), parse_arrival("trace"), None, SLO, options)
        ended = records(what)

    late = [record for record in ended if record.intended_s >= 29.9]
    assert sum(record.error is not None for record in ended) > 100
    assert len(late) == 10
    assert all(SLO.is_met(record) for record in late)


def test_the_router_is_told_how_long_an_answer_may_be() -> None:
    what = plan("synthetic:prompt_tokens=300,output_tokens=50", "constant:rate=1", 1)
    simulation = Simulation(what, PROFILE, ClusterShape())
    simulation.run()

    (explanation,) = simulation.cluster.router.explanations.latest(2)
    estimates = [pair.then for pair in explanation.considered]
    assert [then.decode_s for then in estimates] == pytest.approx([49 * then.tpot_s for then in estimates])


def test_what_can_never_fit_is_refused() -> None:
    profile = PROFILE.model_copy(update={"pool_blocks": 20})

    (record,) = records(plan("synthetic:prompt_tokens=300,output_tokens=50", "constant:rate=1", 1), profile=profile)

    assert record.error == "InvalidRequestError"


def test_nobody_is_overtaken_forever_by_shorter_prompts() -> None:
    what = plan("synthetic:prompt_tokens=1000,output_tokens=1,spread=0.99", "gamma:rate=1,burstiness=0.2", 120)

    summary = summarize(records(what), SLO)

    assert summary.completed == 120


def test_a_request_leaves_no_trace_in_the_times_of_the_next() -> None:
    first, second = records(plan("synthetic:prompt_tokens=500,output_tokens=5", "constant:rate=0.1", 2))

    assert second.gaps_s == pytest.approx(first.gaps_s)


def test_a_prompt_that_waits_for_blocks_lets_admitted_ones_go_on_and_is_not_overtaken_by_smaller_ones(
    tmp_path: Path,
) -> None:
    # The first takes 250 of 260 blocks; the second, shorter and so first in rank, needs 19; the third would fit.
    trace = tmp_path / "trace.csv"
    rows = ["16.0,4000,1", "16.5,300,1", "19.0,80,1"]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:15:{row}" for row in rows)]
    trace.write_text("\n".join(lines))
    profile = PROFILE.model_copy(update={"pool_blocks": 260})
    shape = ClusterShape(prefill=1, decode=3, policy="round_robin")

    ended = records(plan(f"azure:path={trace}", "trace", 3), shape, profile)

    assert [record.session for record in sorted(ended, key=lambda r: r.first_token_s or 0.0)] == [0, 1, 2]
    assert all(record.error is None for record in ended)


def test_goodput_falls_between_a_rate_that_held_and_one_that_did_not() -> None:
    search = GoodputSearch(0.05, precision=0.1)

    run = simulated_goodput(plan("synthetic:prompt_tokens=400,output_tokens=30"), PROFILE, ClusterShape(), search)

    assert 0.2 < search.best_rate < 4
    assert run.summary["slo_attainment"] >= 0.9
    assert len(run.points) == len(search.points)


@pytest.mark.parametrize(
    ("workload", "shape", "words"),
    [
        ("conversation:form=chat", ClusterShape(), "token ids"),
        ("synthetic", ClusterShape(decode=0), "decode worker"),
        ("synthetic", ClusterShape(policy="magic"), "magic"),
    ],
)
def test_what_cannot_be_simulated_is_a_config_error(workload: str, shape: ClusterShape, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(plan(workload), PROFILE, shape)


def test_a_simulation_leaves_garbage_collection_as_it_was() -> None:
    before = gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()

    records(plan("synthetic:prompt_tokens=40,output_tokens=3", sessions=3))

    assert (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()) == before


def test_a_simulation_leaves_no_cycles_so_that_nobody_need_look_for_garbage() -> None:
    crowd = plan("conversation:turns=3,user_tokens=300,output_tokens=30", "poisson:rate=6", 100)
    asking = replace(crowd, options=replace(crowd.options, targets=SLO))
    simulation = Simulation(asking, PROFILE, ClusterShape(1, 1, 1))
    gc.collect()
    gc.disable()

    ended = simulation.run()
    num_found = gc.collect()
    gc.enable()

    assert {record.error for record in ended} == {None, "OverloadedError"}
    assert num_found == 0


def test_the_command_simulates_and_shows_the_same_summary() -> None:
    result = CliRunner().invoke(app, ["simulate", "-n", "5", "--prefill", "2", "--decode", "1", "--json"])

    assert result.exit_code == 0, result.output
    assert '"completed": 5' in result.stdout
