"""`baton loadtest` and `baton simulate`: the command line around runs, searches, comparisons and reports."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli import one_line_errors
from cluster.router.policies.registry import POLICIES
from common.errors import ConfigError
from loadtest.bench.common import machine
from loadtest.capacity import measure_capacity
from loadtest.client import BatonTarget, Target
from loadtest.execute import InterruptedRunError, Plan, execute, find_goodput
from loadtest.goodput import ATTAINMENT, GoodputSearch
from loadtest.metrics import summarize
from loadtest.openai import OpenAITarget
from loadtest.options import (
    ArrivalOption,
    ContextOption,
    DurationOption,
    IgnoreEosOption,
    JsonOption,
    KeyOption,
    ModelOption,
    OutputOption,
    PrecisionOption,
    RateOption,
    ReportOption,
    SeedOption,
    SessionsOption,
    TargetArgument,
    TargetsOption,
    TimeoutOption,
    TpotOption,
    TtftOption,
    VocabOption,
    WordsOption,
    WorkloadOption,
)
from loadtest.progress import LiveProgress
from loadtest.records import RunFile, Slo
from loadtest.report import write_comparison, write_report
from loadtest.runner import RunOptions
from loadtest.simulator.cluster import ClusterShape
from loadtest.simulator.fitted import fitted
from loadtest.simulator.probe import observe
from loadtest.simulator.profile import load_profile
from loadtest.simulator.simulate import simulate as run_simulation
from loadtest.simulator.simulate import simulated_goodput
from loadtest.tables import comparison_table, search_table, summary_table
from loadtest.workload import parse_arrival, parse_workload

app = typer.Typer(
    help="Measure a running cluster, or simulate one.", no_args_is_help=True, pretty_exceptions_enable=False
)
loadtest = typer.Typer(
    help="Send load and measure what comes back.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(loadtest, name="loadtest")


_SEARCH = "find-goodput"


@loadtest.command("run", help="Send one workload and show latencies, throughput, goodput, cache hits and errors.")
@loadtest.command(_SEARCH, help="Bisect the rate at which 90 % of the requests still meet both targets.")
def run(
    context: typer.Context,
    target: TargetArgument = "127.0.0.1:50051",
    workload: WorkloadOption = "synthetic",
    arrival: ArrivalOption = "poisson:rate=2",
    sessions: SessionsOption = None,
    duration: DurationOption = None,
    seed: SeedOption = 0,
    slo_ttft: TtftOption = 2.0,
    slo_tpot: TpotOption = 0.2,
    targets: TargetsOption = False,
    timeout: TimeoutOption = 300.0,
    ignore_eos: IgnoreEosOption = True,
    output: OutputOption = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
    model: ModelOption = None,
    context_tokens: ContextOption = 8192,
    vocab_tokens: VocabOption = None,
    words: WordsOption = False,
    key_file: KeyOption = None,
    search: Annotated[
        bool, typer.Option("--find-goodput", help="Search the highest rate within the SLO; see `find-goodput`.")
    ] = False,
    first_rate: RateOption = 0.5,
    precision: PrecisionOption = 0.05,
) -> None:
    """Send one workload, once or at one rate after the other."""
    with one_line_errors():
        slo = Slo(slo_ttft, slo_tpot)
        asked = slo if targets else None
        options = RunOptions(seed, duration, timeout, ignore_eos, asked)
        plan = _plan(workload, arrival, sessions, slo, options)
        connect = partial(_target, target, model, context_tokens, vocab_tokens, words, key_file)
        is_search = search or context.info_name == _SEARCH
        goodput = GoodputSearch(first_rate, ATTAINMENT, precision) if is_search else None
        try:
            result = asyncio.run(_drive(connect, plan, target, goodput))
        except InterruptedRunError as interrupted:  # what has ended so far was measured, and is worth keeping
            _deliver(interrupted.run, goodput, output, report, as_json)
            raise typer.Exit(130) from interrupted
        _deliver(result, goodput, output, report, as_json)


@loadtest.command()
def compare(
    first: Annotated[Path, typer.Argument(help="JSON of run A; its SLO judges both.")],
    second: Annotated[Path, typer.Argument(help="JSON of run B.")],
    report: ReportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show two runs side by side."""
    with one_line_errors():
        runs = RunFile.load(first), RunFile.load(second)
        summaries = tuple(summarize(item.records, runs[0].slo) for item in runs)
        if as_json:
            typer.echo(json.dumps({"a": summaries[0].as_json(), "b": summaries[1].as_json()}))
        else:
            Console().print(comparison_table(summaries[0], summaries[1], (first.name, second.name)))
        if report is not None:
            names = [f"{letter}: {path.name}" for letter, path in (("A", first), ("B", second))]
            write_comparison(list(zip(names, runs, strict=True)), report)


@loadtest.command("report")
def report_command(
    source: Annotated[Path, typer.Argument(help="JSON of a run.")],
    page: Annotated[Path, typer.Argument(help="HTML file to write.")],
) -> None:
    """Write the HTML page of a run made earlier."""
    with one_line_errors():
        write_report(RunFile.load(source), page, f"Load test: {source.stem}")


@loadtest.command()
def capacity(
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 5.0,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 16,
    http: Annotated[bool, typer.Option("--http", help="Over OpenAI's API instead of gRPC.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say how many requests per second this client can drive, against an echo on another core."""
    with one_line_errors():
        reached = asyncio.run(measure_capacity(duration, prompt_tokens, output_tokens, http))
        if as_json:
            typer.echo(json.dumps(asdict(reached)))
            return
        typer.echo(
            f"{reached.requests_per_s:.0f} requests/s, {reached.tokens_per_s:.0f} tokens/s "
            f"({prompt_tokens} prompt tokens, {output_tokens} messages each, {reached.errors} errors)"
        )


@app.command()
def simulate(
    profile: Annotated[
        str, typer.Option(help="A shipped cost model (two-core-cpu, two-core-epyc, h100-8b) or a YAML file.")
    ] = ("two-core-cpu"),
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    both: Annotated[int, typer.Option(min=0, help="Colocated workers.")] = 0,
    policy: Annotated[str, typer.Option(help=f"Of the router: {', '.join(POLICIES)}.")] = "cost",
    admission: Annotated[
        bool, typer.Option(help="Requests wait at the router, not at a worker, when all have enough to do.")
    ] = True,
    workload: WorkloadOption = "synthetic",
    arrival: ArrivalOption = "poisson:rate=0.5",
    sessions: SessionsOption = None,
    duration: DurationOption = None,
    seed: SeedOption = 0,
    slo_ttft: TtftOption = 2.0,
    slo_tpot: TpotOption = 0.2,
    targets: TargetsOption = False,
    output: OutputOption = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
    search: Annotated[
        bool, typer.Option("--find-goodput", help="Search the highest rate within the SLO instead of one run.")
    ] = False,
    first_rate: RateOption = 0.5,
    precision: PrecisionOption = 0.05,
) -> None:
    """Play a workload against a cluster that exists only as a cost model, with the real router, on a virtual clock."""
    with one_line_errors():
        slo = Slo(slo_ttft, slo_tpot)
        options = RunOptions(seed=seed, duration_s=duration, targets=slo if targets else None)
        plan = _plan(workload, arrival, sessions, slo, options)
        shape = ClusterShape(prefill, decode, both, policy, admission)
        goodput = GoodputSearch(first_rate, ATTAINMENT, precision) if search else None
        model = load_profile(profile)
        if goodput is None:
            result = run_simulation(plan, model, shape)
        else:
            result = simulated_goodput(plan, model, shape, goodput)
        _deliver(result, goodput, output, report, as_json)


@app.command()
def profile(
    target: Annotated[str, typer.Argument(help="HOST:PORT of Baton's gRPC API; nobody else should use the cluster.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="YAML file to write, for `simulate --profile`.")],
    name: Annotated[str | None, typer.Option(help="Of the profile; default: the file's.")] = None,
    where: Annotated[str | None, typer.Option(help="What the cluster runs on; default: this machine.")] = None,
) -> None:
    """Fit a cost model to a running cluster: prompts of several lengths, batches of several sizes, a minute or two."""
    with one_line_errors():
        seen = asyncio.run(observe(target.removeprefix("grpc://")))
        made = fitted(seen, name or output.stem, where or machine())
        made.save(output)
        step, link = made.profile.step, made.profile.link
        typer.echo(
            f"{output}: a step takes {step.base_s * 1e3:.2f} ms, {step.token_s * 1e3:.3f} for each prompt token and "
            f"{step.sequence_s * 1e3:.2f} for each sequence; link {link.bytes_per_s / 1e9:.2f} GB/s; "
            f"median error {made.error:.1%}"
        )


def _plan(workload: str, arrival: str, sessions: int | None, slo: Slo, options: RunOptions) -> Plan:
    return Plan(parse_workload(workload), parse_arrival(arrival), sessions, slo, options)


def _target(
    name: str, model: str | None, context_tokens: int, vocab_tokens: int | None, words: bool, key_file: Path | None
) -> Target:
    try:
        key = None if key_file is None else key_file.expanduser().read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --key-file: {error}") from error
    if not name.startswith(("http://", "https://")):
        return BatonTarget(name.removeprefix("grpc://"), vocab_tokens, key=key)
    return OpenAITarget(name, model, context_tokens, vocab_tokens or 32_000, words, key)


async def _drive(connect: Callable[[], Target], plan: Plan, name: str, search: GoodputSearch | None) -> RunFile:
    console = Console(stderr=True)
    target = connect()  # here, since channels and sessions belong to the running loop
    try:
        model = await target.model()
        with LiveProgress(console, f"{name}, {model.id}") as progress:
            if search is None:
                return await execute(target, model, plan, progress, name)
            return await find_goodput(target, model, plan, search, progress, name)
    finally:
        await target.close()


def _deliver(
    result: RunFile, search: GoodputSearch | None, output: Path | None, report: Path | None, as_json: bool
) -> None:
    """Show the results and write the files that were asked for."""
    if output is not None:
        result.save(output)
    if report is not None:
        write_report(result, report, "Load test" if output is None else f"Load test: {output.stem}")
    if as_json:
        extra = {} if search is None else {"best_rate": search.best_rate, "points": [asdict(p) for p in search.points]}
        typer.echo(json.dumps({**result.summary, **extra}))
        return
    console = Console()
    console.print(summary_table(summarize(result.records, result.slo), result.slo, str(result.meta["target"])))
    if search is not None:
        console.print(search_table(result.points, search.best_rate, ATTAINMENT))


if __name__ == "__main__":
    app()
