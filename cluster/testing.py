"""A cluster in processes of its own, started by `baton serve`: for tests and for `baton demo`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from cluster.client import Client
from cluster.commands.serve import READY_WORD
from common.errors import BatonError, DeadlineError

_LINES_MAX = 2000
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


class RunningCluster:
    """`baton serve` as a subprocess on free ports. A context manager; afterwards nothing of it is left.

    Args:
        overrides: `a.b=c` settings, as for --set. Ports are free ones unless they are set here.
        config: a config file, or None.
        echo: also copy the cluster's output to standard error.
        start_timeout_s: longest wait for it to be ready.
    """

    def __init__(
        self,
        *overrides: str,
        config: Path | None = None,
        echo: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-cluster-")
        self._ready_file = Path(self._folder.name) / "ready.json"
        settings = ["gateway.grpc_port=0", "gateway.http_port=0", *overrides]
        self._command = [sys.executable, "-m", "cluster.cli", "serve", "--ready-file", str(self._ready_file)]
        self._command += [] if config is None else ["-c", str(config)]
        self._command += [part for setting in settings for part in ("--set", setting)]
        self._echo = echo
        self._start_timeout_s = start_timeout_s
        self._lines: deque[str] = deque(maxlen=_LINES_MAX)
        self._announced = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._pump: threading.Thread | None = None

    def __enter__(self) -> "RunningCluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            BatonError: it ended instead; the message is its last line.
            DeadlineError: not ready in time.
        """
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        self._pump = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._pump.start()
        if not self._announced.wait(self._start_timeout_s):
            raise DeadlineError(f"not ready after {self._start_timeout_s:g} s: {self.log[-2000:]}")
        if not self._ready_file.exists():
            raise BatonError(self._lines[-1] if self._lines else "it ended without a word")

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self._lines.append(line.rstrip("\n"))
                if self._echo:
                    sys.stderr.write(line)
                if line.startswith(READY_WORD):
                    self._announced.set()
        self._announced.set()

    @property
    def pid(self) -> int:
        """Of `baton serve`."""
        assert self._process is not None, "started"
        return self._process.pid

    @property
    def log(self) -> str:
        """What it wrote, or the end of it."""
        return "\n".join(self._lines)

    @property
    def addresses(self) -> dict[str, Any]:
        """What the ready file says now: see cluster/commands/serve.py; it follows restarts."""
        addresses: dict[str, Any] = json.loads(self._ready_file.read_text())
        return addresses

    @property
    def address(self) -> str:
        """Of the gateway's gRPC API."""
        return str(self.addresses["grpc"])

    @property
    def pids(self) -> dict[str, int]:
        """The processes that serve now, by member name: router, gateway, prefill-0, ..."""
        return {entry["id"]: entry["pid"] for entry in self.addresses["processes"] if entry["state"] == "ready"}

    def client(self) -> Client:
        """Return a new client of it; close it, or use it in a `with` block."""
        return Client(self.address)

    def kill(self, member: str) -> None:
        """End one member's process by SIGKILL."""
        signal_process(self.pids[member], signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to `baton serve`."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the end of `baton serve` and return its exit code.

        Raises:
            DeadlineError: it still runs.
        """
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"still running after {timeout_s:g} s: {self.log[-2000:]}") from error

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Stop it as Ctrl-C would, by force after `timeout_s`. Returns the exit code; idempotent."""
        if self._process is None:
            return None
        try:
            if self._process.poll() is None:
                self.send(signal.SIGINT)
            return self.wait(timeout_s)
        except DeadlineError:
            self._process.kill()
            return self._process.wait()
        finally:
            if self._pump is not None:
                self._pump.join(5.0)
            self._folder.cleanup()


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process of this machine; no error if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
