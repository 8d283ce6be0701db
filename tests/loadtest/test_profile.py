"""`baton profile`: a cost model comes back out of the times that it makes, and a running cluster gives a usable one."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_pb.v1 import worker_pb2
from cluster.fake_model import write_model
from common.errors import ConfigError
from loadtest.records import RequestRecord
from loadtest.simulator.fit import DecodeSeen, PrefillSeen, PushSeen, fit_link, fit_step
from loadtest.simulator.fitted import fitted
from loadtest.simulator.probe import Observations, ProbePlan, WorkerKind, decodes_seen, observe
from loadtest.simulator.profile import StepCost, load_profile
from tests.cluster.fake_cluster import fake_cluster, run

BUDGET = 512


def prefills(cost: StepCost, rng: Random | None = None, noise: float = 0.0) -> list[PrefillSeen]:
    seen = []
    for num_tokens in (16, 200, 512, 1500, 3000):
        steps = -(-num_tokens // BUDGET)
        seconds = steps * cost.base_s + cost.prefill_s(num_tokens, 0)
        seen.append(PrefillSeen(num_tokens, steps, seconds * (1 + noise * (rng.uniform(-1, 1) if rng else 0.0))))
    return seen


def decodes(cost: StepCost, rng: Random | None = None, noise: float = 0.0) -> list[DecodeSeen]:
    seen = []
    for size, context in product((1, 4, 16), (50, 1000)):
        seconds = cost.base_s + cost.decode_s(size, size * context)
        seconds *= 1 + noise * (rng.uniform(-1, 1) if rng else 0.0)
        seen.append(DecodeSeen(size, size * context, seconds))
    return seen


def costs() -> st.SearchStrategy[StepCost]:
    return st.builds(
        StepCost,
        base_s=st.floats(1e-3, 0.05),
        token_s=st.floats(1e-5, 2e-3),
        attention_s=st.floats(1e-8, 1e-6),
        sequence_s=st.floats(1e-4, 1e-2),
        context_s=st.floats(1e-7, 1e-5),
    )


@given(costs())
def test_a_cost_model_comes_back_out_of_the_times_that_it_makes(cost: StepCost) -> None:
    fit = fit_step(prefills(cost), decodes(cost))

    assert fit.error < 1e-6
    assert fit.step.model_dump() == pytest.approx(cost.model_dump(), rel=1e-3)


@given(costs(), st.integers(0, 1000))
def test_noise_of_a_tenth_moves_predictions_by_little_more_and_makes_nothing_negative(
    cost: StepCost, seed: int
) -> None:
    rng = Random(seed)
    fit = fit_step(prefills(cost, rng, 0.1), decodes(cost, rng, 0.1))

    assert fit.error < 0.1
    for true, guess in zip(prefills(cost), prefills(fit.step), strict=True):
        assert guess.seconds == pytest.approx(true.seconds, rel=0.25)
    assert min(fit.step.model_dump().values()) >= 0


def test_too_few_observations_are_said_in_one_line() -> None:
    cost = load_profile("two-core-cpu").step

    with pytest.raises(ConfigError, match="do not tell a step's parts apart"):
        fit_step(prefills(cost), decodes(cost)[:1])


@pytest.mark.parametrize("sizes", [(1e6, 2e6, 5e6), (1e5,)])
def test_a_link_comes_back_out_of_its_times(sizes: Sequence[float]) -> None:
    link = fit_link([PushSeen(int(size), 0.002 + size / 1e9) for size in sizes])

    for size in sizes:
        assert link.latency_s + size / link.bytes_per_s == pytest.approx(0.002 + size / 1e9)


def test_a_time_that_does_not_grow_with_the_size_is_all_latency() -> None:
    link = fit_link([PushSeen(10**6, 0.004), PushSeen(2 * 10**6, 0.002)])

    assert link.latency_s == pytest.approx(0.003)
    assert link.bytes_per_s >= 1e12


def test_the_file_is_a_profile_that_a_simulation_takes(tmp_path: Path) -> None:
    cost, path = load_profile("two-core-cpu").step, tmp_path / "made.yaml"
    limits = worker_pb2.WorkerLimits(running_max=7, waiting_max=8, token_budget=BUDGET, itl_target_s=0.3)
    kind = WorkerKind(worker_pb2.WORKER_ROLE_BOTH, 99, limits)
    seen = Observations("m", "cpu", 8192, 16, 1000, [kind], [0.002, 0.001, 0.009], prefills(cost), decodes(cost), [])

    fitted(seen, "made", "nowhere").save(path)

    profile = load_profile(str(path))
    assert profile.step.model_dump() == pytest.approx(cost.model_dump(), rel=1e-3)
    assert (profile.pool_blocks, profile.running_max, profile.waiting_max, profile.hop_s) == (99, 7, 8, 0.002)
    assert profile.itl_target_s == 0.3
    assert "nowhere" in profile.sources


def test_a_batch_is_observed_by_its_mean_step_whenever_its_messages_are_read() -> None:
    gaps_s = (0.05, *(0.001, 0.001, 0.028) * 4)  # a step takes 10 ms; the client reads three messages at once
    batch = [
        RequestRecord(f"r{number}", number, 0, 0.0, 0.0, 1.0, prompt_tokens=100, gaps_s=gaps_s, decode_worker="d0")
        for number in range(2)
    ]

    (seen,) = decodes_seen(batch)

    assert seen.num_sequences == 2
    assert seen.num_context == pytest.approx(2 * (100 + 7))
    assert seen.seconds == pytest.approx(0.010)


def test_a_running_cluster_is_observed_and_gets_a_profile(tmp_path: Path) -> None:
    plan = ProbePlan(prompts=(16, 32, 48), repeats=1, batches=((1, 16), (2, 16), (1, 48), (2, 48)), output_tokens=6)
    model_dir = write_model(tmp_path)

    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            cluster.worker("d0").step_s = 0.002
            seen = await observe(cluster.gateway.grpc_address, plan)

            assert seen.block_tokens == 4
            assert {kind.role for kind in seen.workers} == {
                worker_pb2.WORKER_ROLE_PREFILL,
                worker_pb2.WORKER_ROLE_DECODE,
            }
            assert sorted(one.num_tokens for one in seen.prefills) == [
                14,
                30,
                46,
            ]  # two were cached, says the fake
            assert {one.num_sequences for one in seen.decodes} == {1, 2}
            assert len(seen.pushes) == 3

    run(scenario())
