"""What is set outside our own configuration: environments that third parties read, and ties between processes.

The only module that touches an environment. Values come from the configuration; nothing of ours is read from there.
"""

import ctypes
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError

if TYPE_CHECKING:  # the reaper imports this module and must stay small
    from common.config import EngineConfig

_SESSION = "BATON_SESSION"
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def prepare_ray(session: Path | None) -> None:
    """Set what Ray reads at import and hands to all its processes; call before the first `import ray`.

    Args:
        session: the folder of a Ray that this process starts. Its token is made here and nobody else learns it, and
            its processes are marked for `kill_session`. None: an existing Ray is joined; the token and the mode are
            that cluster's and come with the caller's environment.
    """
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        RAY_DISABLE_IMPORT_WARNING="1",
        # Actors without GPUs see none anyway; without this Ray warns that the rule will change.
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        os.environ["RAY_COLOR_PREFIX"] = "0"  # Ray colours its processes' names whatever it writes to
    if session is not None:
        os.environ[_SESSION] = str(session)
        os.environ.update(
            RAY_AUTH_MODE="token",
            # Ray's own 15 would let whatever else runs here, a client even, take the core from a decode step.
            RAY_worker_niceness="0",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
            # How long Ray's parts wait for a GCS that is gone before they end (60 by default): a local one never
            # comes back, but a busy machine may keep it from answering for seconds.
            RAY_gcs_rpc_server_reconnect_timeout_s="20",
        )
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        os.environ.pop("RAY_ADDRESS", None)


def kill_session(session: Path) -> None:
    """Kill what is left of the Ray with this folder: e.g. a worker that was just starting when its raylet ended.

    They are known by the mark in their environment, which every descendant inherits and nobody else has.
    """
    mark = f"{_SESSION}={session}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or is not ours to look at
        if mark in environment.split(b"\0"):
            kill_process(int(folder.name))


def worker_environment(engine: "EngineConfig") -> dict[str, str]:
    """Return the variables of a worker's process: thread counts, and no calls home. CUDA_VISIBLE_DEVICES is Ray's."""
    environment = control_environment()
    # ucxx's package sets a variable that libucx does not know, and libucx complains.
    environment["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    if engine.threads:
        environment |= {name: str(engine.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return environment


def control_environment() -> dict[str, str]:
    """Return the variables of a router's or gateway's process."""
    return {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Ray would run an actor on uvloop wherever that happens to be installed: the loop is the one that is tested.
        "RAY_USE_UVLOOP": "0",
    }


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even while it is stopped or hung.

    Ray's own check runs inside the worker, so a process that got SIGSTOP would outlive its raylet for ever.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_process(pid: int) -> None:
    """Kill a process of this machine; no error if it is gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def check_port_free(host: str, port: int, option: str) -> None:
    """Refuse a port that something listens on.

    gRPC binds with SO_REUSEPORT, so that a second server on a busy port would start and get half of the calls.

    Args:
        host: address to listen on.
        port: 0 is always free.
        option: what the user can change, for the message.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason}; choose another with --set {option}=PORT"
            ) from error
