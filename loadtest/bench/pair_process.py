"""Two processes that move blocks by one means, started, ordered and ended from here. Whatever they do, this goes on."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench import standstill

ROOT = Path(__file__).parents[2]
PEERS = Path("~/.cache/baton/peers/transfer").expanduser()
"""Where tools/transfer_peers.sh puts what is not ours."""
CLOSE_TIMEOUT_S = 8.0
WAKE_S = 0.05
"""After a standstill, for timers that came due in it; a round then begins with a message through both processes."""
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
COMPLAINT_BYTES, COMPLAINT_CHARS = 4096, 160
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""How the last line of a traceback begins."""
_QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n", "GLOG_minloglevel": "3", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, slots=True)
class Means:
    """A way to move blocks: what kvtransfer.bench calls it, and how people do."""

    name: str
    contender: str
    option: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    has_layers: bool = True
    can_stand_still: bool = True
    """Whether its processes may be stopped between turns. Ours take a silent peer for dead; they idle at zero."""


class PairError(Exception):
    """A pair did not start, or broke; the message says why its row is empty."""


class Pair:
    """The two processes of one means on one work. After an error it is over, and only `close` does anything.

    Args:
        means: how they move blocks.
        work: name of the work in kvtransfer/bench/work.py.
        scratch: folder for what they meet at and what they complain of.
    """

    def __init__(self, means: Means, work: str, scratch: Path) -> None:
        self.means = means
        self._work = work
        self._complaints = scratch / f"{work} {means.name}.log"
        self._option = str(scratch / "gloo") if means.contender == "gloo" else means.option
        self._processes: list[asyncio.subprocess.Process] = []
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._broken = ""

    async def start(self, timeout_s: float) -> None:
        """Start both, and wait until they are connected.

        Raises:
            PairError: they cannot be, or not in time.
        """
        sys.stderr.write(f"{self._work}: starting {self.means.name}\n")
        ours, control = socket.socketpair()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MESSAGE_BYTES_MAX)
        with control:
            if self.means.contender == "ray":
                await self._spawn(["kvtransfer.bench.ray_pair", "--option", self._option], control)
            else:
                module = ["kvtransfer.bench.pair", self.means.contender, "--option", self._option]
                sender_end, receiver_end = socket.socketpair()
                with sender_end, receiver_end:
                    await self._spawn([*module, "--link", str(sender_end.fileno())], sender_end)
                    await self._spawn([*module, "--link", str(receiver_end.fileno())], control, receiver_end)
        answer = await self._receive(timeout_s)
        if "unavailable" in answer:
            self._broken = f"skipped: {answer['unavailable']}"
            raise PairError(self._broken)
        self._stand_still()

    async def round(self, order: str, timeout_s: float) -> dict[str, Any]:
        """Have one transfer made and measured; before and after it nothing of this pair runs.

        Raises:
            PairError: it failed, or took too long.
        """
        if self._broken:
            raise PairError(self._broken)
        assert self._writer is not None
        if self.means.can_stand_still:
            self._go_on()
            await asyncio.sleep(WAKE_S)
        try:
            self._writer.write(json.dumps(order).encode() + b"\n")
            return await self._receive(timeout_s)
        finally:
            self._stand_still()

    async def close(self) -> None:
        """End both processes and their children: with a word if they listen, else by a signal."""
        self._go_on()
        if self._writer is not None:
            if not self._broken:
                self._writer.write(b'"quit"\n')
            self._writer.close()  # its end says the same
        patience_s = 0.5 if self._broken else CLOSE_TIMEOUT_S
        await asyncio.gather(*(_end(process, patience_s) for process in self._processes))

    def _stand_still(self) -> None:
        if self.means.can_stand_still:
            standstill.stop([process.pid for process in self._processes])

    def _go_on(self) -> None:
        standstill.go_on([process.pid for process in self._processes])

    async def _spawn(self, module: list[str], *sockets: socket.socket) -> None:
        arguments = [*module, "--work", self._work]
        if len(sockets) == 2 or self.means.contender == "ray":
            arguments += ["--control", str(sockets[0].fileno())]
        environment = {**_QUIET, **self.means.environment}
        if self.means.contender in ("nixl", "mooncake"):
            environment |= {"PYTHONPATH": str(PEERS), "LD_LIBRARY_PATH": str(PEERS / "lib")}
        with self._complaints.open("ab") as complaints:
            process = await asyncio.create_subprocess_exec(
                "env",
                *(f"{name}={value}" for name, value in environment.items()),
                *(sys.executable, "-m", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=[sock.fileno() for sock in sockets],
                cwd=ROOT,
                start_new_session=True,
            )
        self._processes.append(process)

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._reader is not None
        try:
            line = await asyncio.wait_for(self._reader.readline(), timeout_s)
            answer: dict[str, Any] = json.loads(line) if line else {}
        except TimeoutError as error:
            raise self._failed(f"no answer within {timeout_s:.0f} s") from error
        except (OSError, ValueError) as error:
            raise self._failed(f"its answer cannot be read: {error}") from error
        if not answer:
            raise self._failed("a process of the pair ended")
        return answer

    def _failed(self, what: str) -> PairError:
        """Note the end of this pair: an answer that comes later would be taken for that to another order."""
        self._broken = f"failed: {what}"
        if complaint := self._complaint():
            self._broken += f" ({complaint})"
        return PairError(self._broken)

    def _complaint(self) -> str:
        """Return the last error that one of them reported, or else the last line that it had to say."""
        try:
            said = self._complaints.read_bytes()[-COMPLAINT_BYTES:].decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        errors = [line for line in said if _ERROR.match(line)]
        return (errors or said or [""])[-1].strip()[:COMPLAINT_CHARS]


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """Wait for a process, at last without asking; nothing of its session stays."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
