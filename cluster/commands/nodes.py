"""`baton nodes`: which hosts have joined a Ray cluster, against those that should have."""

import json
import socket
import subprocess
import sys
import threading
from typing import Any

from rich.console import Console

from common.errors import BatonError, ConfigError
from common.rpc import is_address

_REFUSED = "InvalidAuthToken"
"""In Ray's log when it asks for a token: it would ask again, in vain, for 20 s."""
_CONNECT_S = 5.0
_LIMIT_S = 30.0
_TOKEN_HINT = (
    "its token is missing or wrong: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file that deploy/ray-ssh.sh "
    "or `ray get-auth-token` left on its hosts. A Ray that `baton serve` started itself has one node and tells its "
    "token to nobody: `baton status` shows what runs there"
)


def nodes(address: str, expected: list[str]) -> None:
    """List the nodes of the Ray cluster at `address`, and the expected ones that are missing.

    A worker that `ray up` could not start leaves no error here or there: only its absence shows it.

    Args:
        address: host:port of the cluster's head, or `auto` on one of its nodes.
        expected: IP addresses.

    Raises:
        ConfigError: the cluster cannot be reached.
        BatonError: a node is missing.
    """
    _check_reachable(address)
    known = _joined(address)
    console = Console(highlight=False)
    joined = {node["host"] for node in known if node["is_alive"]}
    for node in sorted(known, key=lambda node: str(node["host"])):
        state = "joined" if node["is_alive"] else "dead"
        console.print(f"{node['host']}\t{state}\t{node['num_cpus']:g} CPUs", markup=False)
    missing = [host for host in expected if host not in joined]
    for host in missing:
        console.print(f"{host}\tmissing", markup=False)
    if missing:
        raise BatonError(f"{len(missing)} of {len(expected)} expected nodes have not joined: {', '.join(missing)}")


def _check_reachable(address: str) -> None:
    """Refuse an address at which nothing listens: Ray itself would knock for minutes.

    Raises:
        ConfigError: with the system's reason.
    """
    if not is_address(address):
        return  # `auto`, or something that only Ray can judge
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"cannot join Ray at {address}: {(error.strerror or str(error)).lower()}") from error


def _joined(address: str) -> list[dict[str, Any]]:
    """Ask a process of its own, so that what Ray's native code writes is read here and not by the user.

    Raises:
        ConfigError: why the cluster cannot be joined.
    """
    command = [sys.executable, "-m", "cluster.launcher.joined_nodes", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        limit = threading.Timer(_LIMIT_S, asking.kill)
        limit.start()
        try:
            assert asking.stderr is not None
            assert asking.stdout is not None
            is_refused = any(_REFUSED in line for line in asking.stderr)
            if is_refused:
                raise ConfigError(f"cannot join Ray at {address}: {_TOKEN_HINT}")
            answer = json.loads(asking.stdout.read() or "{}")
        finally:
            limit.cancel()
            asking.kill()
    if "nodes" not in answer:
        reason = answer.get("error", f"no answer within {_LIMIT_S:g} s")
        raise ConfigError(f"cannot join Ray at {address}: {_TOKEN_HINT if 'token' in reason.lower() else reason}")
    nodes: list[dict[str, Any]] = answer["nodes"]
    return nodes
