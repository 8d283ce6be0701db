"""From a plan to a run file: one run, or the search for the highest rate within the SLO."""

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from common.errors import ConfigError
from loadtest.arrivals import Arrival, ClosedArrival, TraceArrival, at_rate
from loadtest.client import ServedModel, Target
from loadtest.goodput import GoodputSearch
from loadtest.metrics import summarize
from loadtest.records import RatePoint, RequestRecord, RunFile, Slo
from loadtest.runner import LoadRun, Observer, RunOptions
from loadtest.workload import AzureWorkload, MooncakeWorkload, PromptsWorkload, Workload, take

_SESSIONS_DEFAULT = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send, when, and how to judge it."""

    workload: Workload
    arrival: Arrival
    sessions: int | None
    """Most sessions; None: all of a trace, `duration_s` worth of anything else, or else 100."""
    slo: Slo
    options: RunOptions

    @property
    def sessions_max(self) -> int | None:
        """Return the limit that holds."""
        is_finite = isinstance(self.workload, MooncakeWorkload | AzureWorkload | PromptsWorkload)
        if self.sessions is None and self.options.duration_s is None and not is_finite:
            return _SESSIONS_DEFAULT
        return self.sessions

    def meta(self, target: str, model: str) -> dict[str, Any]:
        """Return what a reader of the results must know."""
        return {
            "target": target,
            "model": model,
            "workload": describe(self.workload),
            "arrival": describe(self.arrival),
            "seed": self.options.seed,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }


class InterruptedRunError(Exception):
    """A run that was cancelled; `run` holds every request that had ended by then."""

    def __init__(self, run: RunFile) -> None:
        super().__init__("the run was interrupted")
        self.run = run


def describe(node: Workload | Arrival) -> str:
    """Return the spec that parses to this node, defaults left out."""
    fields = node.model_dump(exclude_defaults=True, exclude={"kind"})
    return ":".join(filter(None, [node.kind, ",".join(f"{key}={value}" for key, value in fields.items())]))


async def execute(target: Target, model: ServedModel, plan: Plan, observer: Observer, name: str) -> RunFile:
    """Run the plan once.

    Args:
        target: whom to ask.
        model: what `target` serves.
        plan: what to ask.
        observer: sees every request.
        name: of the target, for the results.

    Raises:
        ConfigError: the workload does not fit the model's window, or has no times although they were asked for.
        InterruptedRunError: instead of the cancellation of the task, so that what was measured is not lost.
    """
    run, meta = LoadRun(target, plan.options, observer), plan.meta(name, model.id)
    sessions = take(plan.workload, plan.options.seed, model.context_tokens, plan.sessions_max)
    try:
        await run.run(sessions, plan.arrival)
    except asyncio.CancelledError:
        unfinished = {"interrupted": True, "unfinished": run.num_sent - len(run.records)}
        raise InterruptedRunError(finished_run(plan, run.records, meta | unfinished)) from None
    return finished_run(plan, run.records, meta)


def finished_run(plan: Plan, records: list[RequestRecord], meta: dict[str, Any]) -> RunFile:
    """Return the run file of these records."""
    return RunFile(meta=meta, slo=plan.slo, records=records, summary=summarize(records, plan.slo).as_json())


async def find_goodput(
    target: Target, model: ServedModel, plan: Plan, search: GoodputSearch, observer: Observer, name: str
) -> RunFile:
    """Measure at one rate after the other until the search is over.

    Every measurement asks other content (its seed is the next one), since a cluster that cached the last one's prompts
    would look better each time.

    Returns:
        The run at the best rate (the last one, if none met the goal), with all points.

    Raises:
        ConfigError: the arrivals have no rate to search for.
        InterruptedRunError: with the best run so far and all points; see `execute`.
    """
    if isinstance(plan.arrival, ClosedArrival | TraceArrival):
        raise ConfigError(f"a goodput search needs arrivals with a rate to search for, not {plan.arrival.kind}")
    best: RunFile | None = None
    while (rate := search.next_rate) is not None:
        options = replace(plan.options, seed=plan.options.seed + len(search.points))
        step = replace(plan, arrival=at_rate(plan.arrival, rate), options=options)
        try:
            run = await execute(target, model, step, observer, name)
        except InterruptedRunError as interrupted:
            raise InterruptedRunError(replace(best or interrupted.run, points=tuple(search.points))) from None
        search.observe(rate_point(rate, run))
        if best is None or rate == search.best_rate or not search.best_rate:
            best = run
    assert best is not None
    return replace(best, points=tuple(search.points))


def rate_point(rate: float, run: RunFile) -> RatePoint:
    """Return what a run at this rate says about it."""
    return RatePoint(rate, run.summary["slo_attainment"], run.summary["goodput_per_s"])
