"""The same trace through every routing policy, simulated: hit rate, TTFT, goodput, at 80 % and 120 % of capacity.

Capacity is reckoned without caches: at 100 % the prefill workers would just keep up if nothing were ever reused. Run as
`python -m loadtest.bench.policies TRACE.jsonl`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.router.policies.registry import POLICIES
from loadtest.arrivals import PoissonArrival, TraceArrival
from loadtest.bench.common import BenchRow, publish
from loadtest.content import TokenPrompt
from loadtest.execute import Plan
from loadtest.records import Slo
from loadtest.runner import RunOptions
from loadtest.simulator.cluster import ClusterShape
from loadtest.simulator.profile import Profile, load_profile
from loadtest.simulator.simulate import simulate
from loadtest.workload import MooncakeWorkload, SyntheticWorkload, take

_SLO = Slo(ttft_s=5.0, tpot_s=0.05)
_BASELINE = "round_robin"


def main(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL.")],
    workers: Annotated[int, typer.Option(min=1, help="Of each role.")] = 32,
    sessions: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    profile: Annotated[str, typer.Option(help="Cost model.")] = "h100-8b",
) -> None:
    """Print the table and write build/bench/policies.json."""
    model = load_profile(profile)
    workload = MooncakeWorkload(path=trace, granularity=model.block_tokens)
    base = Plan(workload, TraceArrival(), sessions, _SLO, RunOptions())
    rows: list[BenchRow] = []
    for load in (0.8, 1.2):
        speedup = load / _utilisation(base, model, workers)
        plan = replace(base, arrival=TraceArrival(speedup=speedup))
        rows += _rows(plan, model, workers, f"{trace.stem} at {load:.0%}")
    rows += _rows(_unshared(model, workers, sessions), model, workers, "nothing shared at 80%")
    publish("policies", rows)


def _utilisation(plan: Plan, profile: Profile, workers: int) -> float:
    """Return the prefill seconds that the trace asks for, over those that the workers have, at the trace's own pace."""
    sessions = list(take(plan.workload, 0, profile.context_tokens, plan.sessions))
    duration = (sessions[-1].at_s or 0.0) - (sessions[0].at_s or 0.0)
    return sum(_prefill_s(session.turns[0].prompt, profile) for session in sessions) / (workers * duration)


def _prefill_s(prompt: object, profile: Profile) -> float:
    assert isinstance(prompt, TokenPrompt)
    num_steps = prompt.num_tokens / profile.prefill_token_budget  # steps are shared: a part of one counts as a part
    return num_steps * profile.step.base_s + profile.step.prefill_s(prompt.num_tokens, 0)


def _unshared(profile: Profile, workers: int, sessions: int | None) -> Plan:
    workload = SyntheticWorkload(prompt_tokens=8192, output_tokens=340, spread=0.9)
    mean = SyntheticWorkload(prompt_tokens=8192, output_tokens=340)
    rate = 0.8 * workers / _prefill_s(next(mean.sessions(0, 0)).turns[0].prompt, profile)
    return Plan(workload, PoissonArrival(rate=rate), sessions or 10_000, _SLO, RunOptions())


def _rows(plan: Plan, profile: Profile, workers: int, label: str) -> list[BenchRow]:
    """Return each policy's rows; the peer of each is round_robin in the same run."""
    shapes = {policy: ClusterShape(workers, workers, 0, policy, admission=False) for policy in POLICIES}
    summaries = {policy: simulate(plan, profile, shape).summary for policy, shape in shapes.items()}
    base = summaries[_BASELINE]
    rows = []
    for policy, summary in summaries.items():
        note = (
            f"{summary['completed']} of {summary['requests']} answered, {workers} + {workers} workers, {profile.name}"
        )
        for name, unit, is_higher_better, ours, peer in (
            ("hit rate", "share", True, summary["cache_hit"], base["cache_hit"]),
            ("mean TTFT", "s", False, summary["ttft"]["mean"], base["ttft"]["mean"]),
            ("p99 TTFT", "s", False, summary["ttft"]["p99"], base["ttft"]["p99"]),
            ("goodput", "1/s", True, summary["goodput_per_s"], base["goodput_per_s"]),
        ):
            is_baseline = policy == _BASELINE
            rows.append(
                BenchRow(
                    f"{label}: {policy}: {name}",
                    ours,
                    unit,
                    is_higher_better,
                    peer=None if is_baseline else peer,
                    peer_name=None if is_baseline else _BASELINE,
                    note=note,
                )
            )
    return rows


if __name__ == "__main__":
    typer.run(main)
