"""The same trace through every routing policy, simulated: hit rate, TTFT, goodput, at 80 % and 120 % of capacity.

Capacity is reckoned without caches: at 100 % the prefill workers would just keep up if nothing were ever reused. The
ideal hit rate is that of one cache that never forgets. Each policy's peer is round_robin in the same run; the rows of
`cost` say how it stands to the best of the others. Simulations run side by side, one on each core; that changes no
figure. Without a trace, made-up conversations take its place. `make bench-router TRACE=FILE` runs this after the
router's own figures; alone it is `python -m loadtest.bench.policies [FILE]`.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cluster.router.policies.registry import POLICIES
from loadtest.arrivals import PoissonArrival, TraceArrival
from loadtest.bench.common import BenchRow, publish
from loadtest.content import Segment, TokenPrompt, content_id
from loadtest.execute import Plan
from loadtest.metrics import Summary, summarize
from loadtest.records import Slo
from loadtest.runner import RunOptions
from loadtest.simulator.cluster import ClusterShape
from loadtest.simulator.names import block_names
from loadtest.simulator.profile import Profile, load_profile
from loadtest.simulator.simulate import Simulation
from loadtest.workload import ConversationWorkload, MooncakeWorkload, Session, SyntheticWorkload, take

_SLO = Slo(ttft_s=5.0, tpot_s=0.05)
_WORKERS, _REQUESTS = 32, 12_000
_BASELINE, _OURS = "round_robin", "cost"
_GOODPUT_GOAL = 1.5
"""Times that of the baseline, where there is anything to win: on shared prefixes, beyond capacity."""


def main(
    trace: Annotated[Path | None, typer.Argument(help="Mooncake JSONL; none: made-up conversations.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Of each role.")] = _WORKERS,
    requests: Annotated[int, typer.Option(min=1, help="At most so many, the first ones.")] = _REQUESTS,
    profile: Annotated[str, typer.Option(help="Cost model.")] = "h100-8b",
    admission: Annotated[bool, typer.Option(help="Requests wait at the router when all workers are busy.")] = True,
) -> None:
    """Print the table and write build/bench/policies.json."""
    compare(trace, _Bench(load_profile(profile), workers, admission), requests)


def compare(trace: Path | None, bench: "_Bench | None" = None, requests: int = _REQUESTS) -> None:
    """Simulate every policy and publish the rows; `trace` as for `main`, without a `bench` its defaults."""
    bench = bench or _Bench(load_profile("h100-8b"), _WORKERS, admission=True)
    rows: list[BenchRow] = []
    for load in (0.8, 1.2):
        plan = _conversations(bench, requests, load) if trace is None else _replayed(bench, trace, requests, load)
        name = "conversations" if trace is None else trace.stem
        has_goal = trace is not None and load > 1
        rows += bench.rows(plan, f"{name} at {load:.0%}", _GOODPUT_GOAL if has_goal else None)
    rows += bench.rows(_unshared(bench.profile, bench.workers, requests), "nothing shared at 80%", None)
    publish("policies", rows)


def _replayed(bench: "_Bench", trace: Path, requests: int, load: float) -> Plan:
    """Return a trace, so much sped up that it is that share of what the workers can prefill."""
    workload = MooncakeWorkload(path=trace, granularity=bench.profile.block_tokens)
    plan = Plan(workload, TraceArrival(), requests, _SLO, RunOptions())
    return replace(plan, arrival=TraceArrival(speedup=load / _utilisation(plan, bench.profile, bench.workers)))


def _conversations(bench: "_Bench", requests: int, load: float) -> Plan:
    """Return conversations of about the lengths of the trace, each with one of a few system prompts."""
    turns = 4
    workload = ConversationWorkload(
        turns=turns, systems=16, system_tokens=2048, user_tokens=3072, output_tokens=340, think_s=20.0, spread=0.9
    )
    mean = workload.model_copy(update={"spread": 0.0})
    prompts = _prompts(next(mean.sessions(0, 0)))
    session_s = sum(_prefill_s(TokenPrompt(parts), bench.profile) for parts in prompts)
    return Plan(workload, PoissonArrival(rate=load * bench.workers / session_s), requests // turns, _SLO, RunOptions())


def _utilisation(plan: Plan, profile: Profile, workers: int) -> float:
    """Return the prefill seconds that the trace asks for, over those that the workers have, at the trace's own pace."""
    sessions = list(take(plan.workload, 0, profile.context_tokens, plan.sessions))
    duration = (sessions[-1].at_s or 0.0) - (sessions[0].at_s or 0.0)
    return sum(_prefill_s(session.turns[0].prompt, profile) for session in sessions) / (workers * duration)


def _prefill_s(prompt: object, profile: Profile) -> float:
    assert isinstance(prompt, TokenPrompt)
    num_steps = prompt.num_tokens / profile.prefill_token_budget  # steps are shared: a part of one counts as a part
    return num_steps * profile.step.base_s + profile.step.prefill_s(prompt.num_tokens, 0)


def _unshared(profile: Profile, workers: int, sessions: int) -> Plan:
    workload = SyntheticWorkload(prompt_tokens=8192, output_tokens=340, spread=0.9)
    mean = SyntheticWorkload(prompt_tokens=8192, output_tokens=340)
    rate = 0.8 * workers / _prefill_s(next(mean.sessions(0, 0)).turns[0].prompt, profile)
    return Plan(workload, PoissonArrival(rate=rate), sessions, _SLO, RunOptions())


def _prompts(session: Session) -> Iterator[tuple[Segment, ...]]:
    """Yield each turn's whole prompt, with all that was said before."""
    said: tuple[Segment, ...] = ()
    for number, turn in enumerate(session.turns):
        assert isinstance(turn.prompt, TokenPrompt)
        said = (*said, *(part for part in turn.prompt.parts if isinstance(part, Segment)))
        yield said
        said = (*said, Segment(content_id("answer", session.number, number), turn.output_tokens))


def _ideal_hit(plan: Plan, profile: Profile) -> float:
    """Return the share of prompt tokens that one cache would hold that never forgets and is never late."""
    seen, cached, total = set[bytes](), 0, 0
    for session in take(plan.workload, 0, profile.context_tokens, plan.sessions):
        for parts in _prompts(session):
            num_tokens = sum(part.num_tokens for part in parts)
            names = block_names(parts, profile.block_tokens, num_tokens // profile.block_tokens)
            hits = next((count for count, name in enumerate(names) if name not in seen), len(names))
            cached += min(hits * profile.block_tokens, num_tokens - 1)
            total += num_tokens
            seen.update(names)
    return cached / total


class _Figure(NamedTuple):
    name: str
    unit: str
    is_higher_better: bool
    values: Mapping[str, float]
    """By policy."""

    def best_other(self) -> str:
        others = {policy: value for policy, value in self.values.items() if policy != _OURS}
        return (max if self.is_higher_better else min)(others, key=lambda policy: others[policy])


class _Bench(NamedTuple):
    """One cluster, for every policy the same."""

    profile: Profile
    workers: int
    admission: bool

    def rows(self, plan: Plan, label: str, goodput_goal: float | None) -> list[BenchRow]:
        """Return each policy's rows."""
        found = self._summaries(plan)
        ideal = _ideal_hit(plan, self.profile)
        rows = []
        for figure in _figures(found):
            best = figure.best_other()
            for policy, value in figure.values.items():
                summary = found[policy]
                note = f"{summary.completed} of {summary.requests} answered"
                if figure.name == "hit rate":
                    note += f"; ideal {ideal:.1%}"
                if policy == _OURS:
                    note += f"; best other: {best} {figure.values[best]:.4g}"
                is_baseline = policy == _BASELINE
                rows.append(
                    BenchRow(
                        f"{label}: {policy}: {figure.name}",
                        value,
                        figure.unit,
                        figure.is_higher_better,
                        peer=None if is_baseline else figure.values[_BASELINE],
                        peer_name=None if is_baseline else _BASELINE,
                        goal=_goal(figure, policy, goodput_goal),
                        note=note,
                    )
                )
        return rows

    def _summaries(self, plan: Plan) -> Mapping[str, Summary]:
        # Fresh processes, since a copy of this one would share the other threads' locks.
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as cores:
            return dict(zip(POLICIES, cores.map(partial(self._summary, plan), POLICIES), strict=True))

    def _summary(self, plan: Plan, policy: str) -> Summary:
        shape = ClusterShape(self.workers, self.workers, 0, policy, self.admission)
        return summarize(Simulation(plan, self.profile, shape).run(), plan.slo)


def _figures(found: Mapping[str, Summary]) -> list[_Figure]:
    return [
        _Figure("hit rate", "share", True, {policy: each.cache_hit for policy, each in found.items()}),
        _Figure("mean TTFT", "s", False, {policy: each.ttft.mean for policy, each in found.items()}),
        _Figure("p99 TTFT", "s", False, {policy: each.ttft.p99 for policy, each in found.items()}),
        _Figure("goodput", "1/s", True, {policy: each.goodput_per_s for policy, each in found.items()}),
    ]


def _goal(figure: _Figure, policy: str, goodput_goal: float | None) -> float | None:
    if policy != _OURS or figure.name != "goodput":
        return None
    return (goodput_goal or 1.0) * figure.values[_BASELINE]


if __name__ == "__main__":
    typer.run(main)
