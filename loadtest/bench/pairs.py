"""All means of moving blocks, and their measurement round by round in turn, within limits of time."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.pair_process import Means, Pair, PairError
from loadtest.bench.samples import Samples

STARTING_MAX = 4
"""Pairs that start at once: peers take seconds of processor time to be imported."""

_UCX_TCP = {"UCX_TLS": "tcp,self", "UCX_TCP_TX_SEG_SIZE": "512K", "UCX_TCP_RX_SEG_SIZE": "512K"}

OURS_SHM = Means("ours, shm", "ours", "shm", can_stand_still=False)
OURS_UCX = Means("ours, ucx", "ours", "ucx", can_stand_still=False)
OURS_TCP = Means("ours, tcp", "ours", "tcp", can_stand_still=False)
PLAIN_UCX = Means("ours, ucx, no checksums", "ours", "ucx,plain", can_stand_still=False)
PLAIN_TCP = Means("ours, tcp, no checksums", "ours", "tcp,plain", can_stand_still=False)
MEMCPY = Means("memcpy in one process", "memcpy")
COPY = Means("our copy in one process", "copy")
RAW_TCP = Means("raw TCP", "tcp")
SUMMED_TCP = Means("raw TCP with checksums", "tcp", "checksums")
NIXL = Means("NIXL", "nixl", "default")
NIXL_TCP = Means("NIXL over TCP", "nixl", "tcp", _UCX_TCP)
MOONCAKE = Means("Mooncake over TCP", "mooncake")
ALL = (
    MEMCPY,
    Means("memcpy in one process, huge pages", "memcpy-huge"),
    COPY,
    OURS_SHM,
    OURS_UCX,
    OURS_TCP,
    PLAIN_UCX,
    PLAIN_TCP,
    RAW_TCP,
    SUMMED_TCP,
    NIXL,
    NIXL_TCP,
    MOONCAKE,
    Means("gloo", "gloo"),
    Means("Ray object store", "ray", "store", has_layers=False),
    Means("Ray Direct Transport", "ray", "direct", has_layers=False),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is measured: a fast means gets all rounds, a slow one as many as fit, and none holds up the others."""

    rounds: int
    """Of each means in each order, after one that counts only if no other fits."""
    row_s: float = 4.0
    """Seconds for the rounds of one means in one order, with their verification."""
    round_s: float = 20.0
    """A round that takes longer ends its pair."""
    start_s: float = 60.0
    """The same of a start."""
    total_s: float = 450.0
    """Seconds for everything that is begun under these limits; what is left then has its rows without numbers."""

    def deadline(self) -> "Deadline":
        """Begin now."""
        return Deadline(self, time.monotonic() + self.total_s)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Limits that have begun."""

    limits: Limits
    at: float
    """Of the monotonic clock."""

    def left_s(self, most: float) -> float:
        """Return how long something may take that may take `most`; raises `PairError` if the time is up."""
        left = min(most, self.at - time.monotonic())
        if left <= 0:
            raise PairError(f"left out: the {self.limits.total_s:.0f} s of this run were over")
        return left


async def measure(
    means: Sequence[Means], work: str, orders: Sequence[str], deadline: Deadline, scratch: Path
) -> dict[tuple[str, str], Samples]:
    """Measure all means in turn, round by round, so that what else the machine does hits all of them alike.

    Whoever is not on turn is stopped: some libraries keep cores busy while they wait, and the others' figures would be
    those of a loaded machine.

    Args:
        means: what to measure.
        work: name of the work in kvtransfer/bench/work.py.
        orders: "whole", "layers", "streamed".
        deadline: how much, and until when.
        scratch: folder for what pairs meet at and for what they complain of.

    Returns:
        The samples by (name of the means, order): each has numbers, or the reason why not.
    """
    samples = {(one.name, order): Samples(deadline.limits.rounds) for one in means for order in orders}
    pairs = [Pair(one, work, scratch) for one in means]
    try:
        gate = asyncio.Semaphore(STARTING_MAX)
        reasons = await asyncio.gather(*(_start(pair, gate, deadline) for pair in pairs))
        for pair, reason in zip(pairs, reasons, strict=True):
            for order in orders:
                samples[pair.means.name, order].absent = reason
        sys.stderr.write(f"{work}: at most {deadline.limits.rounds} rounds\n")
        for number in range(deadline.limits.rounds + 1):
            for order in orders:
                for pair in pairs:
                    await _one_round(pair, order, samples[pair.means.name, order], deadline, is_first=number == 0)
    finally:
        await asyncio.gather(*(pair.close() for pair in pairs))
    return samples


async def _start(pair: Pair, gate: asyncio.Semaphore, deadline: Deadline) -> str:
    """Start a pair; return why it cannot be measured, or nothing."""
    async with gate:
        try:
            await pair.start(deadline.left_s(deadline.limits.start_s))
        except PairError as error:
            return str(error)
    return ""


async def _one_round(pair: Pair, order: str, samples: Samples, deadline: Deadline, is_first: bool) -> None:
    limits = deadline.limits
    if samples.absent or (not is_first and samples.spent_s >= limits.row_s):
        return
    if order == "layers" and not pair.means.has_layers:
        samples.absent = "moves whole arrays only"
        return
    begun = time.monotonic()
    try:
        result = await pair.round(order, deadline.left_s(limits.round_s))
    except PairError as error:
        samples.ended(str(error))
        return
    samples.add(result, time.monotonic() - begun, is_first)
