"""`make bench-simulator`: what the simulator predicts against what real clusters on this machine do.

A cluster of one prefill and one decode worker is started and a cost model fitted to it. Then it, and after it a cluster
of one worker of role `both`, runs a workload, and the simulator plays the same one with that cost model. Nothing that
the runs measured goes into the predictions. Run as `python -m loadtest.bench.simulator`.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cluster.testing import RunningCluster
from loadtest.bench.common import BenchRow, machine, publish
from loadtest.client import BatonTarget
from loadtest.execute import Plan, execute
from loadtest.metrics import Summary, summarize
from loadtest.records import RequestRecord, Slo
from loadtest.runner import RunOptions, Unobserved
from loadtest.simulator.cluster import ClusterShape
from loadtest.simulator.fitted import fitted
from loadtest.simulator.probe import observe
from loadtest.simulator.profile import Profile, load_profile
from loadtest.simulator.simulate import simulate
from loadtest.workload import parse_arrival, parse_workload

_GOAL = 0.15
"""Largest relative error."""
_APART = (1, 1, 0)
_TOGETHER = (0, 0, 1)


@dataclass(frozen=True, slots=True)
class _Setup:
    plan: Plan
    prefill: int
    decode: int
    both: int

    @property
    def label(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.both} both"

    def cluster(self) -> RunningCluster:
        counts = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        settings = [f"{role}.workers={count}" for role, count in counts.items()]
        return RunningCluster("log_level=WARNING", *settings)

    def predicted(self, profile: Profile) -> Summary:
        shape = ClusterShape(self.prefill, self.decode, self.both)
        return summarize(simulate(self.plan, profile, shape).records, self.plan.slo)


def main(
    workload: Annotated[str, typer.Option("-w")] = "synthetic:prompt_tokens=320,output_tokens=32,spread=0.5",
    arrival: Annotated[str, typer.Option("-a")] = "poisson:rate=0.6",
    sessions: Annotated[int, typer.Option("-n", min=2)] = 30,
    seed: Annotated[int, typer.Option()] = 1,
    slo_ttft: Annotated[float, typer.Option("--slo-ttft")] = 1.5,
    slo_tpot: Annotated[float, typer.Option("--slo-tpot")] = 0.05,
    profile: Annotated[str | None, typer.Option(help="A profile to use; default: fitted at the beginning.")] = None,
    save: Annotated[Path | None, typer.Option(help="Where to write the fitted profile.")] = None,
) -> None:
    """Print predicted and measured side by side, and write build/bench/simulator.json."""
    options = RunOptions(seed=seed)
    plan = Plan(parse_workload(workload), parse_arrival(arrival), sessions, Slo(slo_ttft, slo_tpot), options)
    model = None if profile is None else load_profile(profile)
    rows: list[BenchRow] = []
    for setup in (_Setup(plan, *_APART), _Setup(plan, *_TOGETHER)):
        with setup.cluster() as cluster:
            if model is None:
                made = fitted(asyncio.run(observe(cluster.address)), "bench-simulator", machine())
                model = made.profile
                if save is not None:
                    made.save(save)
            records = asyncio.run(_measured(cluster.address, plan))
        rows += _rows(setup, setup.predicted(model), summarize(records, plan.slo))
    publish("simulator", rows)


async def _measured(address: str, plan: Plan) -> list[RequestRecord]:
    target = BatonTarget(address)
    try:
        run = await execute(target, await target.model(), plan, Unobserved(), address)
        return list(run.records)
    finally:
        await target.close()


def _rows(setup: _Setup, predicted: Summary, measured: Summary) -> list[BenchRow]:
    note = f"{measured.completed} of {measured.requests} answered"
    rows = []
    for name, unit, is_higher_better, ours, real in (
        ("mean TTFT", "ms", False, predicted.ttft.mean * 1e3, measured.ttft.mean * 1e3),
        ("p50 TTFT", "ms", False, predicted.ttft.p50 * 1e3, measured.ttft.p50 * 1e3),
        ("p90 TTFT", "ms", False, predicted.ttft.p90 * 1e3, measured.ttft.p90 * 1e3),
        ("mean TPOT", "ms", False, predicted.tpot.mean * 1e3, measured.tpot.mean * 1e3),
        ("p90 TPOT", "ms", False, predicted.tpot.p90 * 1e3, measured.tpot.p90 * 1e3),
        ("goodput", "1/s", True, predicted.goodput_per_s, measured.goodput_per_s),
    ):
        label = f"{setup.label}: {name}"
        rows.append(BenchRow(f"{label}, predicted", ours, unit, is_higher_better, real, "measured", note=note))
        error = abs(ours / real - 1) if real else float(ours != 0)
        rows.append(BenchRow(f"{label}, relative error", error, "", False, goal=_GOAL))
    return rows


if __name__ == "__main__":
    typer.run(main)
