"""`make bench-scale`: how long the simulator takes for a large cluster and many requests, on one core.

Half of the workers prefill, half decode (profile h100-8b). Prompts have 1,229 to 2,867 tokens, the first 1,024 of them
one of a hundred beginnings, answers 77 to 179. The time is the processor's, of the one thread that simulates: what else
the machine does is not counted, but makes the core slower. `make bench-scale` compiles what the simulation runs
(tools/compile_simulator.py); `python -m loadtest.bench.scale` interprets it.
"""

import argparse
import time

from loadtest.bench.common import BenchRow, publish
from loadtest.execute import Plan
from loadtest.metrics import summarize
from loadtest.records import Slo
from loadtest.runner import RunOptions
from loadtest.simulator import cluster
from loadtest.simulator.cluster import ClusterShape
from loadtest.simulator.profile import load_profile
from loadtest.simulator.simulate import simulate
from loadtest.workload import parse_arrival, parse_workload

_GOAL_S = 600.0
_REQUESTS, _WORKERS = 1_000_000, 1000
_WORKLOAD = "synthetic:prompt_tokens=2048,output_tokens=128,spread=0.4,prefixes=100,prefix_tokens=1024"
_WORKER_RATE = 16.0
"""Requests a second for each prefill worker: what a cache lacks, about 1,024 tokens, takes it 0.04 s."""
_SLO = Slo(1.0, 0.05)


def main() -> None:
    """Simulate once and publish the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=_REQUESTS)
    parser.add_argument("--workers", type=int, default=_WORKERS, help="of both roles together")
    parser.add_argument("--worker-rate", type=float, default=_WORKER_RATE, help="requests/s for each prefill worker")
    arguments = parser.parse_args()
    half = arguments.workers // 2
    arrival = parse_arrival(f"poisson:rate={half * arguments.worker_rate}")
    plan = Plan(parse_workload(_WORKLOAD), arrival, arguments.requests, _SLO, RunOptions(seed=1))
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    run = simulate(plan, load_profile("h100-8b"), ClusterShape(half, half))
    cpu_s, wall_s = time.process_time() - begin_cpu_s, time.monotonic() - begin_s
    summary = summarize(run.records, _SLO)
    how = "interpreted" if cluster.__file__.endswith(".py") else "compiled"
    note = (
        f"{how}, {cpu_s / arguments.requests * 1e6:.0f} us a request, {wall_s:.0f} s passed; simulated: "
        f"{summary.completed} answered, mean TTFT {summary.ttft.mean * 1e3:.0f} ms, cache hit {summary.cache_hit:.0%}"
    )
    name = f"{arguments.requests:,} requests on {2 * half:,} workers, CPU time"
    is_whole = (arguments.requests, arguments.workers) == (_REQUESTS, _WORKERS)
    publish("scale", [BenchRow(name, cpu_s, "s", False, goal=_GOAL_S if is_whole else None, note=note)])


if __name__ == "__main__":
    main()
