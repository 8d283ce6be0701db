"""Pairs of processes that move the same blocks, each by its own means, driven round by round in turn."""

import asyncio
import json
import socket
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.common import Repeated

ROOT = Path(__file__).parents[2]
PEERS = Path("~/.cache/baton/peers/transfer").expanduser()
"""Where tools/transfer_peers.sh puts what is not ours."""
START_TIMEOUT_S = 90.0
ROUND_TIMEOUT_S = 60.0
MESSAGE_BYTES_MAX = 16 * 1024 * 1024

_UCX_TCP = {"UCX_TLS": "tcp,self", "UCX_TCP_TX_SEG_SIZE": "512K", "UCX_TCP_RX_SEG_SIZE": "512K"}
_QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n", "GLOG_minloglevel": "3", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, slots=True)
class Means:
    """A way to move blocks: what kvtransfer.bench calls it, and how people do."""

    name: str
    contender: str
    option: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    has_layers: bool = True


OURS_SHM = Means("ours, shm", "ours", "shm")
OURS_UCX = Means("ours, ucx", "ours", "ucx")
OURS_TCP = Means("ours, tcp", "ours", "tcp")
PLAIN_UCX = Means("ours, ucx, no checksums", "ours", "ucx,plain")
PLAIN_TCP = Means("ours, tcp, no checksums", "ours", "tcp,plain")
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


@dataclass(slots=True)
class Samples:
    """What was measured of one means in one form."""

    seconds: list[float] = field(default_factory=list)
    sender_cpu_s: list[float] = field(default_factory=list)
    receiver_cpu_s: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    """Of ours: where the seconds went."""
    absent: str = ""
    """Why nothing was measured."""

    def add(self, result: dict[str, Any]) -> None:
        """Take one round; one that moved wrong bytes ends the measuring of this means."""
        if not result["ok"]:
            self.absent = "it delivered wrong bytes"
            return
        self.seconds.append(result["seconds"])
        self.sender_cpu_s.append(result["sender_cpu_s"])
        self.receiver_cpu_s.append(result["receiver_cpu_s"])
        if parts := result.get("parts"):
            self.parts.append(parts)

    @property
    def is_measured(self) -> bool:
        """Whether there are numbers, all of right transfers."""
        return bool(self.seconds) and not self.absent

    @property
    def ms(self) -> Repeated:
        """Milliseconds of a transfer."""
        return Repeated.of([seconds * 1000 for seconds in self.seconds])

    @property
    def cpu(self) -> str:
        """Return the processor time at both ends, for people."""
        both = [statistics.median(times) * 1000 for times in (self.sender_cpu_s, self.receiver_cpu_s)]
        return f"CPU {both[0]:.1f} + {both[1]:.1f} ms"

    @property
    def breakdown(self) -> str:
        """Return where the time of ours went, medians for people; empty of others."""
        names = self.parts[0] if self.parts else {}
        medians = {name: statistics.median(parts[name] for parts in self.parts) * 1000 for name in names}
        return " + ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in medians.items())


class PairError(Exception):
    """A pair did not start, or broke; the message says why its row is empty."""


class Pair:
    """The two processes of one means on one work."""

    def __init__(self, means: Means, work: str) -> None:
        self.means = means
        self._work = work
        self._processes: list[asyncio.subprocess.Process] = []
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def start(self, scratch: Path) -> None:
        """Start both, and wait until they are connected.

        Raises:
            PairError: they cannot be.
        """
        ours, control = socket.socketpair()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MESSAGE_BYTES_MAX)
        option = str(scratch / "gloo") if self.means.contender == "gloo" else self.means.option
        with control:
            if self.means.contender == "ray":
                await self._spawn(["kvtransfer.bench.ray_pair", "--option", option], control)
            else:
                module = ["kvtransfer.bench.pair", self.means.contender, "--option", option]
                sender_end, receiver_end = socket.socketpair()
                with sender_end, receiver_end:
                    await self._spawn([*module, "--link", str(sender_end.fileno())], sender_end)
                    await self._spawn([*module, "--link", str(receiver_end.fileno())], control, receiver_end)
        answer = await self._receive(START_TIMEOUT_S)
        if "unavailable" in answer:
            raise PairError(f"skipped: {answer['unavailable']}")

    async def round(self, order: str) -> dict[str, Any]:
        """Have one transfer made and measured.

        Raises:
            PairError: it failed.
        """
        self._writer.write(json.dumps(order).encode() + b"\n")
        return await self._receive(ROUND_TIMEOUT_S)

    async def close(self) -> None:
        """End both processes."""
        self._writer.write(b'"quit"\n')
        for process in reversed(self._processes):
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._writer.close()

    async def _spawn(self, module: list[str], *sockets: socket.socket) -> None:
        arguments = [*module, "--work", self._work]
        if len(sockets) == 2 or self.means.contender == "ray":
            arguments += ["--control", str(sockets[0].fileno())]
        environment = {**_QUIET, **self.means.environment}
        if self.means.contender in ("nixl", "mooncake"):
            environment |= {"PYTHONPATH": str(PEERS), "LD_LIBRARY_PATH": str(PEERS / "lib")}
        process = await asyncio.create_subprocess_exec(
            "env",
            *(f"{name}={value}" for name, value in environment.items()),
            *(sys.executable, "-m", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=[sock.fileno() for sock in sockets],
            cwd=ROOT,
        )
        self._processes.append(process)

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._reader.readline(), timeout_s)
        except (TimeoutError, ConnectionError) as error:
            raise PairError(f"failed: no answer within {timeout_s:.0f} s") from error
        if not line:
            raise PairError("failed: a process of the pair ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def measure(
    means: Sequence[Means], work: str, orders: Sequence[str], rounds: int, scratch: Path
) -> dict[tuple[str, str], Samples]:
    """Measure all means in turn, round by round, so that what else the machine does hits all of them alike.

    Args:
        means: what to measure.
        work: name of the work in kvtransfer/bench/work.py.
        orders: "whole", "layers".
        rounds: of each order, after one that is not counted.
        scratch: folder for what pairs meet at.

    Returns:
        The samples by (name of the means, order).
    """
    samples = {(one.name, order): Samples() for one in means for order in orders}
    async with AsyncExitStack() as stack:
        pairs = []
        for one in means:
            pair = Pair(one, work)
            sys.stderr.write(f"{work}: starting {one.name}\n")
            try:
                await pair.start(scratch)
            except PairError as error:
                for order in orders:
                    samples[one.name, order].absent = str(error)
            else:
                pairs.append(pair)
            stack.push_async_callback(pair.close)
        sys.stderr.write(f"{work}: {rounds} rounds\n")
        for number in range(rounds + 1):
            for order in orders:
                for pair in pairs:
                    await _one_round(pair, order, samples[pair.means.name, order], is_counted=number > 0)
    return samples


async def _one_round(pair: Pair, order: str, samples: Samples, is_counted: bool) -> None:
    if samples.absent:
        return
    if order == "layers" and not pair.means.has_layers:
        samples.absent = "moves whole arrays only"
        return
    try:
        result = await pair.round(order)
    except PairError as error:
        samples.absent = str(error)
        return
    if is_counted or not result["ok"]:
        samples.add(result)
