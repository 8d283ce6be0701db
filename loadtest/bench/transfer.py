"""`make bench-transfer`: paged KV from one process's pool into another's, by ours and by others' means, in one run.

The work is 1,024 tokens of KV of the demo model (23.6 MB) and of Llama 3 8B (134 MB), in blocks of 16 tokens, into
other block ids. Time runs at the receiver, from asking to all bytes in place; each round is verified byte for byte,
outside of the time. Rounds of all means alternate, and whoever is not on turn is stopped (SIGSTOP; ours idle at zero
instead): several libraries keep cores busy while they wait, and all figures would be of a loaded machine. CPU time is
that of the sender's process and the receiver's.
Time has limits: a means that is slow gets fewer rounds, and one that fails or hangs a row that says so.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli import one_line_errors
from common.errors import ConfigError
from loadtest.bench.common import BenchRow, Repeated, publish
from loadtest.bench.pair_process import Means, Pair, PairError
from loadtest.bench.pairs import (
    ALL,
    COPY,
    MEMCPY,
    MOONCAKE,
    NIXL,
    NIXL_TCP,
    OURS_SHM,
    OURS_TCP,
    OURS_UCX,
    PLAIN_TCP,
    PLAIN_UCX,
    RAW_TCP,
    SUMMED_TCP,
    Deadline,
    Limits,
    measure,
)
from loadtest.bench.samples import Samples

ALL_WORK = ["demo", "8b", "streamed", "packing", "storm"]
NAMES = "; ".join(one.name for one in ALL)
TITLES = {"demo": "23.6 MB", "8b": "134 MB"}
ORDERS = {"whole": "whole", "layers": "by layer"}
OURS = (OURS_SHM, OURS_UCX, OURS_TCP)
LIMITS = (COPY, MEMCPY, RAW_TCP, SUMMED_TCP)
CPU_GOALS = (
    # means, end, most ms a 23.6 MB KV; a sender that is read from has messages to write and nothing else
    (OURS_SHM, "receiver", 10.0),
    (OURS_SHM, "sender", 3.0),
    (OURS_UCX, "sender", 20.0),
    (OURS_TCP, "sender", 20.0),
)
SHM_LIMIT, NIXL_FACTOR, TCP_LIMIT, PACKING_SHARE, FAIR_FACTOR = 1.15, 2.5, 1.1, 0.9, 2.0

Results = dict[tuple[str, str], Samples]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of each transfer, interleaved; at most.")] = 9,
    only: Annotated[
        list[str], typer.Option(help=f"Measure these means only, by the begin of their names: {NAMES}. Repeatable.")
    ] = [],  # noqa: B006
    work: Annotated[list[str], typer.Option(help=f"Of: {', '.join(ALL_WORK)}. Repeatable.")] = ALL_WORK,
    row_s: Annotated[float, typer.Option(min=0, help="Seconds for the rounds of one means on one work.")] = 4.0,
    total_s: Annotated[float, typer.Option(min=1, help="Seconds for everything; what is left then is left out.")] = 450,
) -> None:
    """Measure transfers between two processes of this machine, beside memcpy, sockets and others' libraries."""
    with one_line_errors():
        for name in only:
            if not any(one.name.startswith(name) for one in ALL):
                raise ConfigError(f"--only {name!r} begins none of the means: {NAMES}")
        for name in work:
            if name not in ALL_WORK:
                raise ConfigError(f"--work {name!r} is none of {', '.join(ALL_WORK)}")
    means = [one for one in ALL if not only or any(one.name.startswith(name) for name in only)]
    limits = Limits(rounds, row_s=row_s, total_s=total_s)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        publish("transfer", asyncio.run(_rows(means, limits.deadline(), work, Path(folder))))


async def _rows(means: Sequence[Means], deadline: Deadline, works: Sequence[str], scratch: Path) -> list[BenchRow]:
    rows: list[BenchRow] = []
    for name, title in TITLES.items():
        if name not in works:
            continue
        folder = scratch / name
        folder.mkdir()
        results = await measure(means, name, list(ORDERS), deadline, folder)
        for order in ORDERS:
            rows += _means_rows(results, title, order)
    if "streamed" in works:
        rows += await _streamed_rows([one for one in means if one in OURS], deadline, scratch)
    if "packing" in works:
        rows += await _packing_rows([one for one in means if one in OURS], deadline, scratch)
    if "storm" in works:
        for one in means:
            if one in OURS:
                rows += await _storm_rows(one, deadline, scratch)
    return rows


def _means_rows(results: Results, title: str, order: str) -> list[BenchRow]:
    """Return ours beside the limits, then each of the others beside ours."""
    by_name = {name: samples for (name, form), samples in results.items() if form == order}
    label = f"{title} {ORDERS[order]}"
    rows = []
    for ours, limit, factor in (
        (OURS_SHM, MEMCPY, SHM_LIMIT),
        (OURS_SHM, COPY, None),
        (COPY, MEMCPY, None),
        *((ours, RAW_TCP, TCP_LIMIT) for ours in (OURS_UCX, OURS_TCP, PLAIN_UCX, PLAIN_TCP)),
        *((ours, SUMMED_TCP, TCP_LIMIT) for ours in (OURS_UCX, OURS_TCP)),
    ):
        if ours.name in by_name:
            rows.append(_row(label, by_name[ours.name], ours.name, by_name.get(limit.name), limit.name, factor))
    goals = {NIXL.name: 1 / NIXL_FACTOR, NIXL_TCP.name: 1.0, MOONCAKE.name: 1.0}
    for name, samples in by_name.items():
        if name.startswith("ours") or name in [limit.name for limit in LIMITS]:
            continue
        ours = OURS_UCX if name in (NIXL_TCP.name, MOONCAKE.name) else OURS_SHM
        if ours.name in by_name:
            rows.append(_row(label, by_name[ours.name], ours.name, samples, name, goals.get(name)))
    return rows


def _row(
    label: str, ours: Samples, ours_name: str, peer: Samples | None, peer_name: str, factor: float | None
) -> BenchRow:
    """Return one comparison; the goal is `factor` times the peer's time."""
    if not ours.is_measured:
        return BenchRow(f"{label}: {ours_name}", 0.0, "ms", False, note=f"ours: {ours.absent}")
    measured = peer is not None and peer.is_measured
    peer_ms = peer.ms if peer is not None and measured else None
    note = f"ours {ours.cpu}" + (f" ({ours.breakdown} ms)" if ours.parts else "") + _rounds(ours)
    if peer is not None and peer_ms is not None:
        note += f"; peer {peer.cpu}, spread {peer_ms.spread:.0%}{_rounds(peer)}"
    elif peer is not None:
        note += f"; {peer_name} {peer.absent}"
    return BenchRow(
        f"{label}: {ours_name}",
        ours.ms.median,
        "ms",
        False,
        peer=None if peer_ms is None else peer_ms.median,
        peer_name=peer_name,
        goal=None if factor is None or peer_ms is None else factor * peer_ms.median,
        spread=ours.ms.spread,
        note=note,
    )


def _rounds(samples: Samples) -> str:
    return f", {samples.rounds}" if samples.rounds else ""


async def _streamed_rows(means: Sequence[Means], deadline: Deadline, scratch: Path) -> list[BenchRow]:
    """Return the processor time that a KV costs which travels in groups of layers, while it is being computed."""
    results = await measure(means, "demo", ["streamed"], deadline, scratch)
    rows = []
    for one, end, goal in CPU_GOALS:
        samples = results.get((one.name, "streamed"))
        label = f"23.6 MB while it is computed, CPU at the {end}: {one.name}"
        if samples is None:
            continue
        if not samples.is_measured:
            rows.append(BenchRow(label, 0.0, "ms", False, note=samples.absent))
            continue
        seconds = samples.sender_cpu_s if end == "sender" else samples.receiver_cpu_s
        cpu = Repeated.of([one_round * 1000 for one_round in seconds])
        rows.append(BenchRow(label, cpu.median, "ms", False, goal=goal, spread=cpu.spread, note=samples.rounds))
    return rows


async def _packing_rows(means: Sequence[Means], deadline: Deadline, scratch: Path) -> list[BenchRow]:
    """Return the rate of 100,000 small blocks beside that of the same bytes in large ones."""
    small, large = [await measure(means, work, ["whole"], deadline, scratch) for work in ("6KiB", "360KiB")]
    rows = []
    for one in means:
        label = f"100,000 blocks of 6 KiB: {one.name}"
        few, many = large[one.name, "whole"], small[one.name, "whole"]
        if not (few.is_measured and many.is_measured):
            rows.append(BenchRow(label, 0.0, "GB/s", True, note=few.absent or many.absent))
            continue
        rate, reference = (
            Repeated.of([num_bytes / seconds / 1e9 for seconds in samples.seconds])
            for samples, num_bytes in ((many, 100_000 * 6144), (few, 100_000 // 60 * 368_640))
        )
        rows.append(
            BenchRow(
                label,
                rate.median,
                "GB/s",
                True,
                peer=reference.median,
                peer_name="blocks of 360 KiB",
                goal=PACKING_SHARE * reference.median,
                spread=rate.spread,
                note=f"{many.cpu}{_rounds(many)}; large blocks {few.cpu}, spread {reference.spread:.0%}{_rounds(few)}",
            )
        )
    return rows


async def _storm_rows(means: Means, deadline: Deadline, scratch: Path) -> list[BenchRow]:
    """Return what became of 1,000 transfers at once, of which a fifth is given up by one side or the other."""
    pair, limits = Pair(means, "storm", scratch), deadline.limits
    label = f"1,000 transfers at once, 20 % given up: {means.name}"
    try:
        await pair.start(deadline.left_s(limits.start_s))
        await pair.round("storm", deadline.left_s(limits.round_s))
        result = await pair.round("storm", deadline.left_s(limits.round_s))
    except PairError as error:
        return [BenchRow(label, 0.0, "x", False, note=str(error))]
    finally:
        await pair.close()
    landed = [float(seconds) for seconds in result["landed"]]
    if not landed:
        return [BenchRow(label, 0.0, "x", False, note=f"none landed: {'; '.join(sorted(set(result['errors']))[:2])}")]
    slowest, middle = landed[-1], landed[len(landed) // 2]
    wrong = len(result["errors"])
    note = f"{len(landed)} landed within {slowest * 1000:.0f} ms, half of them in {middle * 1000:.0f} ms"
    return [
        BenchRow(f"{label}: slowest / median", slowest / middle, "x", False, goal=FAIR_FACTOR, note=note),
        BenchRow(
            f"{label}: errors and leaks",
            float(wrong + result["left"]),
            "",
            False,
            goal=0.0,
            note="; ".join(sorted(set(result["errors"]))[:2]),
        ),
    ]


if __name__ == "__main__":
    typer.run(main)
