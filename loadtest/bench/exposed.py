"""`make bench-exposed`: how much of a KV transfer the client waits for, beside the prefill that hides the rest.

One prefill and one decode worker of one thread each, without Ray, on links of different kinds. Exposed is the time from
the first token's arrival at the decode worker to the moment at which the sequence can decode there.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from cluster.model_store import resolve
from common.config_file import load
from loadtest.bench.common import BenchRow, Repeated, publish
from loadtest.bench.exposed_pair import START_TIMEOUT_S, PairSettings, Sample
from loadtest.bench.network import LinkShape, TwoHosts, why_no_hosts

LENGTHS = (128, 512, 1024, 2048, 4096)
GOAL_TOKENS = 1024
GOALS = {"shm": 2.0, "ucx": 5.0, "tcp": 5.0}
"""Exposed / prefill at `GOAL_TOKENS`, percent."""
SHAPES = {"1g": LinkShape(mbit=1000), "delay": LinkShape(delay_ms=10), "1g-delay": LinkShape(mbit=1000, delay_ms=10)}
LINKS = ("shm", "ucx", "ucx/1g", "ucx/1g-delay")
LINK_S = 100.0
"""Seconds for the prompts of one link; on a slow machine there are fewer rounds then, and the rows say how many."""
GRACE_S = 60.0
"""What a link may take beyond that: its workers start before and end after, and one prompt is under way."""
SETTINGS = ("engine.threads=1", "engine.pool_mib=1024", "decode.token_budget=512")
ONLY_TCP = ["env", "UCX_TLS=tcp,self", "UCX_WARN_UNUSED_ENV_VARS=n"]
"""UCX's shared memory sees through network namespaces, and loopback is to stand for a network."""


def main() -> None:
    """Measure each link and publish the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default=",".join(LINKS), help=f"transport, or transport/{'|'.join(SHAPES)}")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each length on each link")
    parser.add_argument("--link-s", type=float, default=LINK_S, help="seconds for the prompts of one link")
    parser.add_argument("--set", action="append", default=[], help="a setting of both workers, a.b=c")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    overrides = [*SETTINGS, *arguments.set]
    rows = []
    for link in arguments.links.split(","):
        try:
            rows += _measure(link, lengths, arguments.rounds, arguments.link_s, overrides)
        except subprocess.CalledProcessError as error:
            rows.append(_not_run(link, f"its workers failed, with code {error.returncode}"))
        except subprocess.TimeoutExpired as error:
            rows.append(_not_run(link, f"no end within {error.timeout:.0f} s"))
        except RuntimeError as error:
            rows.append(_not_run(link, str(error)))
    publish("exposed", rows)


def _measure(link: str, lengths: Sequence[int], rounds: int, link_s: float, overrides: Sequence[str]) -> list[BenchRow]:
    """Return a row for each length.

    Raises:
        RuntimeError: the link cannot be made.
        subprocess.SubprocessError: its workers failed, or took far too long.
    """
    transport, _, shape = link.partition("/")
    if shape and (reason := why_no_hosts()):
        return [_not_run(link, reason)]
    model_dir = str(resolve(load(None, list(overrides)).model).path)
    with contextlib.ExitStack() as stack:
        prefixes: tuple[list[str], list[str]] = ([], [])
        hosts = ("127.0.0.1", "127.0.0.1")
        if shape:
            two = stack.enter_context(TwoHosts(SHAPES[shape]))
            prefixes, hosts = (two.prefix(0), two.prefix(1)), two.addresses
        settings = PairSettings(
            model_dir,
            hosts,
            prefixes[0],
            [*overrides, f"transfer.transport={transport}"],
            list(lengths),
            rounds,
            link_s,
        )
        command = [*prefixes[1], *ONLY_TCP, sys.executable, "-m", "loadtest.bench.exposed_pair"]
        done = subprocess.run(
            [*command, json.dumps(asdict(settings))],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=START_TIMEOUT_S + link_s + GRACE_S,
        )
    samples = [Sample(**json.loads(line)) for line in done.stdout.splitlines()]
    return [_row(link, length, [s for s in samples if s.num_tokens == length], rounds) for length in lengths]


def _not_run(what: str, reason: str) -> BenchRow:
    return BenchRow(f"{what}: exposed / prefill", float("nan"), "%", False, note=f"not run: {reason}")


def _row(link: str, num_tokens: int, samples: Sequence[Sample], rounds: int) -> BenchRow:
    if not samples:
        return _not_run(f"{link}, {num_tokens} tokens", "the time was up before (--link-s)")
    exposed = Repeated.of([sample.exposed_s * 1e3 for sample in samples])
    prefill = Repeated.of([sample.prefill_s * 1e3 for sample in samples])
    local = Repeated.of([sample.local_prefill_s * 1e3 for sample in samples])
    goal = GOALS.get(link) if num_tokens == GOAL_TOKENS else None
    share = 100 * exposed.median / prefill.median
    slower = 100 * (prefill.median / local.median - 1)
    note = (
        f"exposed {exposed.median:.2f} ms of {prefill.median:.0f} ms over {samples[0].transport}; "
        f"prefill {slower:+.1f} % beside one that pushes nothing"
    )
    if len(samples) < rounds:
        note += f"; {len(samples)} of {rounds} rounds"
    name = f"{link}, {num_tokens} tokens: exposed / prefill"
    return BenchRow(name, share, "%", False, goal=goal, spread=exposed.spread, note=note)


if __name__ == "__main__":
    main()
