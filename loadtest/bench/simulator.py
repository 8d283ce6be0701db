"""`make bench-simulator`: what the simulator predicts against what real clusters on this machine do.

A cluster of one prefill and one decode worker is started, a cost model fitted to it, and a workload run; then the same
with one worker of role `both`, which has the threads of those two and so a cost model of its own. The simulator plays
the workload with each one's model. Nothing that the clients measured in the run goes into the predictions.

A machine that others use is not as fast in the run as it was in the fit. So there is a second prediction: the cost
model scaled to the seconds that the workers themselves counted for their steps in the run. It says how well the
simulator knows queues, schedules and transfers, whatever the machine's speed. Run as
`python -m loadtest.bench.simulator`.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from baton_pb.v1 import worker_pb2
from cluster.router.step_model import StepTotals
from cluster.testing import RunningCluster
from loadtest.bench.common import BenchRow, machine, publish
from loadtest.client import BatonTarget
from loadtest.execute import Plan, execute
from loadtest.metrics import Summary, summarize
from loadtest.records import RequestRecord, Slo
from loadtest.runner import RunOptions, Unobserved
from loadtest.simulator.cluster import ClusterShape
from loadtest.simulator.fitted import fitted
from loadtest.simulator.probe import cluster_status, observe
from loadtest.simulator.profile import Profile, StepCost
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
    save: Annotated[Path | None, typer.Option(help="A folder for the fitted profiles.")] = None,
) -> None:
    """Print predicted and measured side by side, and write build/bench/simulator.json."""
    options = RunOptions(seed=seed)
    plan = Plan(parse_workload(workload), parse_arrival(arrival), sessions, Slo(slo_ttft, slo_tpot), options)
    rows: list[BenchRow] = []
    for setup in (_Setup(plan, *_APART), _Setup(plan, *_TOGETHER)):
        with setup.cluster() as cluster:
            made = fitted(asyncio.run(observe(cluster.address)), f"bench-simulator, {setup.label}", machine())
            run = asyncio.run(_measured(cluster.address, plan))
        model = made.profile
        if save is not None:
            made.save(save / f"{setup.label.replace(' ', '-')}.yaml")
        measured = summarize(run.records, plan.slo)
        rows += _rows(setup.label, "predicted", setup.predicted(model), measured, model.name)
        pace = _Pace.of(run.work, model.step)
        note = f"prompt work took {pace.prompts:.2f}, decode work {pace.decodes:.2f} times the fitted seconds"
        rows += _rows(setup.label, "at the run's speed", setup.predicted(pace.applied(model)), measured, note)
    publish("simulator", rows)


@dataclass(frozen=True, slots=True)
class _Measured:
    records: list[RequestRecord]
    work: list[tuple["worker_pb2.WorkerRole.ValueType", StepTotals]]
    """What each worker computed in the run."""


class _Pace(NamedTuple):
    """Seconds that work took in a run, over those of a cost model."""

    prompts: float
    decodes: float

    @classmethod
    def of(cls, work: list[tuple["worker_pb2.WorkerRole.ValueType", StepTotals]], step: StepCost) -> "_Pace":
        """Return the pace of the workers that prefill, and of those that decode."""
        prefill, decode = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
        return cls(
            _ratio([totals for role, totals in work if role != decode], step),
            _ratio([totals for role, totals in work if role != prefill], step),
        )

    def applied(self, profile: Profile) -> Profile:
        """Return the profile at this pace."""
        step = profile.step
        changed = {
            "base_s": step.base_s * self.decodes,
            "token_s": step.token_s * self.prompts,
            "attention_s": step.attention_s * self.prompts,
            "sequence_s": step.sequence_s * self.decodes,
            "context_s": step.context_s * self.decodes,
        }
        return profile.model_copy(update={"step": step.model_copy(update=changed)})


def _ratio(work: list[StepTotals], step: StepCost) -> float:
    fitted_s = sum(
        totals.steps * step.base_s
        + totals.prompt_tokens * step.token_s
        + totals.prompt_pairs * step.attention_s
        + totals.sequences * step.sequence_s
        + totals.context_tokens * step.context_s
        for totals in work
    )
    return sum(totals.seconds for totals in work) / fitted_s


async def _measured(address: str, plan: Plan) -> _Measured:
    target = BatonTarget(address)
    try:
        before = await _totals(address)
        run = await execute(target, await target.model(), plan, Unobserved(), address)
        after = await _totals(address)
    finally:
        await target.close()
    work = [(role, _between(before[worker_id][1], totals)) for worker_id, (role, totals) in after.items()]
    return _Measured(list(run.records), work)


def _between(before: StepTotals, after: StepTotals) -> StepTotals:
    return StepTotals(
        steps=after.steps - before.steps,
        seconds=after.seconds - before.seconds,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        prompt_pairs=after.prompt_pairs - before.prompt_pairs,
        sequences=after.sequences - before.sequences,
        context_tokens=after.context_tokens - before.context_tokens,
    )


async def _totals(address: str) -> dict[str, tuple["worker_pb2.WorkerRole.ValueType", StepTotals]]:
    """Return what each worker has computed so far, by its last report."""
    status = await cluster_status(address)
    return {
        row.worker_id: (row.role, StepTotals(*(getattr(row.load.steps, name) for name in StepTotals._fields)))
        for row in status.router.workers
    }


def _rows(label: str, what: str, predicted: Summary, measured: Summary, note: str) -> list[BenchRow]:
    rows = []
    for name, unit, is_higher_better, ours, real in (
        ("mean TTFT", "ms", False, predicted.ttft.mean * 1e3, measured.ttft.mean * 1e3),
        ("p90 TTFT", "ms", False, predicted.ttft.p90 * 1e3, measured.ttft.p90 * 1e3),
        ("mean TPOT", "ms", False, predicted.tpot.mean * 1e3, measured.tpot.mean * 1e3),
        ("p90 TPOT", "ms", False, predicted.tpot.p90 * 1e3, measured.tpot.p90 * 1e3),
        ("goodput", "1/s", True, predicted.goodput_per_s, measured.goodput_per_s),
    ):
        row = f"{label}: {name}, {what}"
        rows.append(BenchRow(row, ours, unit, is_higher_better, real, "measured", note=note))
        error = abs(ours / real - 1) if real else float(ours != 0)
        rows.append(BenchRow(f"{row}, error", error, "", False, goal=_GOAL))
    return rows


if __name__ == "__main__":
    typer.run(main)
