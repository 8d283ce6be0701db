"""Two hosts on one machine: network namespaces with a link that has a rate, a delay and losses. Needs root."""

import os
import secrets
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

COMMAND_TIMEOUT_S = 30
SUBNET = "10.77.23"
MTU = 9000


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What a link does to bytes, in each direction."""

    mbit: float | None = None
    """Rate, Mbit/s; None: as fast as the machine."""
    delay_ms: float = 0.0
    """One way."""
    loss: float = 0.0
    """Share of the frames that do not arrive; takes a delay."""


def why_no_hosts() -> str | None:
    """Return why this machine cannot make network namespaces, or None."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "iproute2 is not installed"
    name = f"baton-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        return f"no right to make network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, timeout=COMMAND_TIMEOUT_S)
    return None


class TwoHosts:
    """Two namespaces, joined through a third that holds the link. A context manager; afterwards nothing is left.

    host 0 ──veth── bridge a ══ (delay line, or a veth) ══ bridge b ──veth── host 1
    """

    def __init__(self, shape: LinkShape) -> None:
        tag = secrets.token_hex(2)
        self.addresses = (f"{SUBNET}.1", f"{SUBNET}.2")
        self._hosts = (f"baton-{tag}-0", f"baton-{tag}-1")
        self._switch = f"baton-{tag}-s"
        self._shape = shape
        self._stack = ExitStack()

    def prefix(self, number: int) -> list[str]:
        """Return what a command is preceded by to run on a host."""
        return ["ip", "netns", "exec", self._hosts[number]]

    def __enter__(self) -> "TwoHosts":
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _build(self) -> None:
        for name in (*self._hosts, self._switch):
            _run("ip", "netns", "add", name)
            self._stack.callback(_delete, name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for bridge in ("bra", "brb"):
            _run("ip", "-n", self._switch, "link", "add", bridge, "mtu", str(MTU), "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", bridge, "up")
        for host, address, bridge in zip(self._hosts, self.addresses, ("bra", "brb"), strict=True):
            self._join(host, address, bridge)
        self._link()

    def _join(self, host: str, address: str, bridge: str) -> None:
        """Connect a host to its bridge; what it sends is slowed to the link's rate."""
        port = f"p{bridge}"
        _run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", port, "netns", self._switch)
        for name, device in ((host, "eth0"), (self._switch, port)):
            _run("ip", "-n", name, "link", "set", device, "mtu", str(MTU), "up")
        _run("ip", "-n", self._switch, "link", "set", port, "master", bridge)
        _run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
        if self._shape.mbit is not None:
            rate = ("rate", f"{self._shape.mbit}mbit", "burst", "256kb", "latency", "50ms")
            _run(*self._in(host), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)

    def _link(self) -> None:
        ends = ("linka", "linkb")
        assert self._shape.delay_ms or not self._shape.loss
        if self._shape.delay_ms:
            self._start_delay_line(*ends)
        else:
            _run("ip", "-n", self._switch, "link", "add", ends[0], "type", "veth", "peer", ends[1])
        for end, bridge in zip(ends, ("bra", "brb"), strict=True):
            _run("ip", "-n", self._switch, "link", "set", end, "mtu", str(MTU), "master", bridge, "up")

    def _start_delay_line(self, *ends: str) -> None:
        line = subprocess.Popen(
            [
                *self._in(self._switch),
                sys.executable,
                "-m",
                "loadtest.bench.delay_line",
                *ends,
                str(self._shape.delay_ms),
                str(self._shape.loss),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(_end, line)
        assert line.stdout is not None
        if line.stdout.readline() != "up\n":
            raise RuntimeError("the delay line did not start")

    @staticmethod
    def _in(name: str) -> list[str]:
        return ["ip", "netns", "exec", name]


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process by the end of its standard input."""
    process.communicate("x", timeout=COMMAND_TIMEOUT_S)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _delete(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, timeout=COMMAND_TIMEOUT_S)
