"""`baton nodes`: which hosts have joined a Ray cluster, against those that should have."""

import logging
from typing import Any

from rich.console import Console

from cluster.launcher import processes
from common.errors import BatonError, ConfigError


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
    processes.prepare_ray(None)
    import ray

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # the edge: Ray raises whatever its parts raise
        raise ConfigError(f"cannot join Ray at {address}: {' '.join(str(error).split())}") from error
    try:
        known: list[dict[str, Any]] = ray.nodes()
    finally:
        ray.shutdown()
    console = Console(highlight=False)
    joined = {node["NodeManagerAddress"] for node in known if node["Alive"]}
    for node in sorted(known, key=lambda node: str(node["NodeManagerAddress"])):
        state = "joined" if node["Alive"] else "dead"
        console.print(f"{node['NodeManagerAddress']}\t{state}\t{node['Resources'].get('CPU', 0):g} CPUs", markup=False)
    missing = [host for host in expected if host not in joined]
    for host in missing:
        console.print(f"{host}\tmissing", markup=False)
    if missing:
        raise BatonError(f"{len(missing)} of {len(expected)} expected nodes have not joined: {', '.join(missing)}")
