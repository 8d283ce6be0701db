"""`python -m cluster.launcher.joined_nodes ADDRESS`: prints the nodes of a Ray cluster as JSON.

A process of its own, because Ray's native code writes to its standard error what only its caller can judge.
"""

import json
import logging
import sys
from typing import Any

from cluster.launcher import processes


def main(address: str) -> None:
    """Print the nodes, or Ray's reason why they cannot be had."""
    processes.prepare_ray(None)
    import ray

    answer: dict[str, Any]
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        answer = {"nodes": [_described(node) for node in ray.nodes()]}
    except Exception as error:  # the edge: Ray raises whatever its parts raise
        answer = {"error": " ".join(str(error).split()) or type(error).__name__}
    sys.stdout.write(json.dumps(answer))


def _described(node: dict[str, Any]) -> dict[str, Any]:
    return {
        "host": str(node["NodeManagerAddress"]),
        "is_alive": bool(node["Alive"]),
        "num_cpus": float(node["Resources"].get("CPU", 0)),
    }


if __name__ == "__main__":
    main(sys.argv[1])
