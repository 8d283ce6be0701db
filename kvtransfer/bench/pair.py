"""`python -m kvtransfer.bench.pair`: one of two processes that move blocks; the benchmark starts and drives them.

The receiver takes orders from the benchmark, measures, and asks the sender to do its part.
"""

import argparse
import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from typing import Any

from kvtransfer.bench import baselines, peers
from kvtransfer.bench.contender import Contender, Link, Side, Unavailable
from kvtransfer.bench.ours import Ours
from kvtransfer.bench.work import WORKS, Pool

CONTENDERS: dict[str, type[Contender]] = {
    "ours": Ours,
    "memcpy": baselines.InProcess,
    "memcpy-huge": baselines.InProcessHuge,
    "copy": baselines.MappedCopy,
    "tcp": baselines.RawTcp,
    "nixl": peers.Nixl,
    "mooncake": peers.Mooncake,
    "gloo": peers.Gloo,
}


PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the benchmark ends: stopped for another's turn, it could not notice."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_s() -> float:
    """Return the processor time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def send(side: Side, contender: Contender) -> None:
    """Do what the receiver orders, until it is gone."""
    side.pool.fill()
    await contender.connect()
    side.link.send("connected")
    while (order := await side.link.receive()) != "quit":
        if order == "cpu":
            side.link.send(cpu_s())
        else:
            await contender.serve(order)
    await contender.close()


async def receive(side: Side, contender: Contender, control: Link) -> None:
    """Measure what the benchmark orders, until it is gone."""
    side.pool.clear()
    await contender.connect()
    await side.link.receive()
    control.send({"ready": True})
    while (order := await control.receive()) != "quit":
        control.send(await measured(side, contender, order))
    side.link.send("quit")
    await contender.close()


async def measured(side: Side, contender: Contender, order: Any) -> dict[str, Any]:
    """Run one round, and return its numbers; `ok` says whether every byte is where it belongs."""
    gc.collect()
    side.link.send("cpu")
    sender_before, before = await side.link.receive(), cpu_s()
    begun = time.perf_counter()
    result: dict[str, Any] = {}
    if order == "storm":
        assert isinstance(contender, Ours)
        result = await contender.storm()
    elif order == "streamed":
        assert isinstance(contender, Ours)
        await contender.stream()
    else:
        await contender.fetch(order == "layers")
        result = {"parts": contender.parts} if isinstance(contender, Ours) else {}
    seconds, after = time.perf_counter() - begun, cpu_s()
    side.link.send("cpu")
    sender_after = await side.link.receive()
    is_right = order == "storm" or side.pool.is_right()
    side.pool.clear()
    return {
        **result,
        "seconds": seconds,
        "receiver_cpu_s": after - before,
        "sender_cpu_s": sender_after - sender_before,
        "ok": is_right,
    }


async def main() -> None:
    """Be one half of a pair."""
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--option", default="")
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--link", type=int, required=True, help="descriptor of the socket to the other half")
    parser.add_argument("--control", type=int, help="descriptor of the socket to the benchmark: be the receiver")
    arguments = parser.parse_args()
    kind = CONTENDERS[arguments.contender]
    pool = Pool(WORKS[arguments.work], kind.is_shared)
    side = Side(arguments.control is None, pool, await Link.of(arguments.link))
    contender = kind(side, arguments.option)
    if arguments.control is None:
        await send(side, contender)
        return
    control = await Link.of(arguments.control)
    try:
        await receive(side, contender, control)
    except Unavailable as error:
        control.send({"unavailable": str(error)})
        await control.receive()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (EOFError, Unavailable, ConnectionError):
        sys.exit(1)
    sys.stdout.flush()
    os._exit(0)  # peers' threads and their exit handlers are nobody's concern any more
