"""`python -m kvtransfer.bench.ray_pair`: two Ray actors move the blocks.

Through the object store, or by Ray's own tensor transport over gloo. Loaded by name, as other peers are.
"""

import argparse
import asyncio
import importlib
import os
import time
from typing import Any

import numpy as np

from kvtransfer.bench.contender import Link
from kvtransfer.bench.pair import cpu_s, end_with_parent
from kvtransfer.bench.work import WORKS, Pool


class Half:
    """One actor. Ray returns whole arrays, so that gathering and scattering blocks stays with the user."""

    def __init__(self, work: str, is_sender: bool) -> None:
        self._pool = Pool(WORKS[work], is_shared=False)
        self._pool.fill() if is_sender else self._pool.clear()

    def gathered(self) -> Any:
        """Sender: return the source blocks in one array, for the object store."""
        return self._pool.blocks[self._pool.work.sources()]

    def gathered_tensor(self) -> Any:
        """Sender: the same as a tensor, for the tensor transport."""
        return importlib.import_module("torch").from_numpy(self.gathered())

    def scatter(self, blocks: Any) -> None:
        """Receiver: write what came to the target blocks."""
        self._pool.blocks[self._pool.work.targets()] = np.asarray(blocks)

    def cpu_s(self) -> float:
        """Return the processor time of this actor."""
        return cpu_s()

    def is_right(self) -> bool:
        """Receiver: verify and clear."""
        is_right = self._pool.is_right()
        self._pool.clear()
        return is_right


class RayPair:
    """Both actors, and the driver that passes a reference from one to the other."""

    def __init__(self, work: str, is_direct: bool) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self._name = "gathered_tensor" if is_direct else "gathered"
        half: Any = Half
        if is_direct:
            half.gathered_tensor = self._ray.method(tensor_transport="gloo")(Half.gathered_tensor)
            actor = self._ray.remote(enable_tensor_transport=True)(half)
        else:
            actor = self._ray.remote(half)
        self._sender, self._receiver = (actor.remote(work, is_sender) for is_sender in (True, False))
        self._get([self._sender.cpu_s.remote(), self._receiver.cpu_s.remote()])
        if is_direct:
            collective = importlib.import_module("ray.experimental.collective")
            collective.create_collective_group([self._sender, self._receiver], backend="gloo")

    def round(self) -> dict[str, Any]:
        """Move the blocks once, and return the numbers."""
        actors = (self._sender, self._receiver)
        before = self._get([actor.cpu_s.remote() for actor in actors])
        begun = time.perf_counter()
        self._get(self._receiver.scatter.remote(getattr(self._sender, self._name).remote()))
        seconds = time.perf_counter() - begun
        after = self._get([actor.cpu_s.remote() for actor in actors])
        return {
            "seconds": seconds,
            "sender_cpu_s": after[0] - before[0],
            "receiver_cpu_s": after[1] - before[1],
            "ok": self._get(self._receiver.is_right.remote()),
        }

    def close(self) -> None:
        """Stop this Ray."""
        self._ray.shutdown()

    def _get(self, references: Any) -> Any:
        return self._ray.get(references, timeout=60)


async def main() -> None:
    """Measure what the benchmark orders, until it is gone."""
    end_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--option", choices=["store", "direct"], required=True)
    parser.add_argument("--control", type=int, required=True)
    arguments = parser.parse_args()
    control = await Link.of(arguments.control)
    pair = await asyncio.to_thread(RayPair, arguments.work, arguments.option == "direct")
    control.send({"ready": True})
    try:
        while await control.receive() != "quit":
            control.send(await asyncio.to_thread(pair.round))
    finally:
        pair.close()


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # threads of Ray's and gloo's are nobody's concern any more
