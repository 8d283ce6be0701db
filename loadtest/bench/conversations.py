"""`make bench-conversations`: real clusters of two prefill and two decode workers, one for each policy, in turn.

Conversations send the real answers back, so each turn begins with what some workers have computed. All clusters
get the same conversations at the same times, in the order of the policies, `rounds` times; rows are medians, with their
spread. Beside the table, each run's JSON and page and a page that compares the last round's, with the load of each
worker over time, are left in build/bench/conversations. Run as `python -m loadtest.bench.conversations`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from cluster.testing import RunningCluster
from loadtest.bench.common import FOLDER, BenchRow, Repeated, publish
from loadtest.client import BatonTarget
from loadtest.execute import Plan, execute
from loadtest.metrics import Summary, summarize
from loadtest.records import RunFile, Slo
from loadtest.report import write_comparison, write_report
from loadtest.runner import RunOptions, Unobserved
from loadtest.workload import parse_arrival, parse_workload

_BASELINE, _OURS = "round_robin", "cost"
"""The goal: the second one's mean TTFT is no longer than the first one's."""


def main(
    policies: Annotated[list[str], typer.Option("--policy", help="Repeatable; round_robin is the peer.")] = [  # noqa: B006
        _BASELINE,
        _OURS,
    ],
    workload: Annotated[str, typer.Option("-w")] = (
        "conversation:turns=4,systems=4,system_tokens=160,user_tokens=64,output_tokens=24,think_s=1"
    ),
    arrival: Annotated[str, typer.Option("-a")] = "poisson:rate=0.22",
    sessions: Annotated[int, typer.Option("-n", min=1)] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    prefill: Annotated[int, typer.Option(min=0)] = 2,
    decode: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the table and write build/bench/conversations.json and the pages."""
    plan = Plan(parse_workload(workload), parse_arrival(arrival), sessions, Slo(2.0, 0.2), RunOptions())
    runs: dict[str, list[RunFile]] = {policy: [] for policy in policies}
    for number in range(rounds):
        seeded = replace(plan, options=replace(plan.options, seed=number))
        for policy in policies:
            settings = [f"router.policy={policy}", f"prefill.workers={prefill}", f"decode.workers={decode}"]
            with RunningCluster("log_level=WARNING", *settings) as cluster:
                run = asyncio.run(_run(cluster.address, seeded, f"{prefill}P{decode}D, {policy}"))
            runs[policy].append(run)
            name = f"{policy}-{number}"
            run.save(FOLDER / "conversations" / f"{name}.json")
            write_report(run, FOLDER / "conversations" / f"{name}.html", f"Conversations: {policy}")
    write_comparison([(policy, done[-1]) for policy, done in runs.items()], FOLDER / "conversations" / "compared.html")
    summaries = {policy: [summarize(run.records, plan.slo) for run in done] for policy, done in runs.items()}
    publish("conversations", [row for policy in policies for row in rows_of(policy, summaries)])


async def _run(address: str, plan: Plan, name: str) -> RunFile:
    target = BatonTarget(address)
    try:
        return await execute(target, await target.model(), plan, Unobserved(), name)
    finally:
        await target.close()


def rows_of(policy: str, summaries: dict[str, list[Summary]]) -> list[BenchRow]:
    """Return a policy's rows, from each policy's rounds."""
    mine, base = summaries[policy], summaries.get(_BASELINE)
    rows = []
    measures: tuple[tuple[str, str, bool, Callable[[Summary], float]], ...] = (
        ("mean TTFT", "ms", False, lambda one: one.ttft.mean * 1e3),
        ("p90 TTFT", "ms", False, lambda one: one.ttft.p90 * 1e3),
        ("mean TPOT", "ms", False, lambda one: one.tpot.mean * 1e3),
        ("cache hit", "share", True, lambda one: one.cache_hit),
        ("goodput", "1/s", True, lambda one: one.goodput_per_s),
    )
    for name, unit, is_higher_better, of in measures:
        ours = Repeated.of([of(one) for one in mine])
        peer = None if base is None or policy == _BASELINE else Repeated.of([of(one) for one in base]).median
        rows.append(
            BenchRow(
                f"{policy}: {name}",
                ours.median,
                unit,
                is_higher_better,
                peer,
                None if peer is None else _BASELINE,
                goal=peer if (policy, name) == (_OURS, "mean TTFT") else None,
                spread=ours.spread if len(mine) > 1 else None,
                note=f"{sum(one.completed for one in mine)} of {sum(one.requests for one in mine)} answered",
            )
        )
    return rows


if __name__ == "__main__":
    typer.run(main)
