"""One prefill and one decode worker on a link, asked one prompt after the other: what of the transfer is not hidden.

`python -m loadtest.bench.exposed_pair SETTINGS` prints one JSON line a prompt. Runs where the decode worker runs.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from baton_pb.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from loadtest.bench.bare_worker import BareWorker

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
VOCAB_FROM, VOCAB_TO = 1000, 20_000


@dataclass(frozen=True, slots=True)
class PairSettings:
    """Where the two workers run, and what is asked."""

    model_dir: str
    hosts: tuple[str, str]
    """Addresses of the prefill and of the decode worker."""
    prefill_prefix: list[str]
    """What the prefill worker's command is preceded by."""
    overrides: list[str]
    lengths: list[int]
    rounds: int
    limit_s: float
    """No prompt begins later than this after the first one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt; seconds."""

    num_tokens: int
    local_prefill_s: float
    """The same length at the decode worker, which pushes nothing."""
    prefill_s: float
    exposed_s: float
    transport: str


async def measure(settings: PairSettings) -> AsyncIterator[Sample]:
    """Yield a sample for each length of each round, as long as there is time.

    The shortest prompt comes first, unmeasured: it makes the connection.
    """
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(_worker(settings, role)) for role in ("prefill", "decode")]
        async with grpc.aio.insecure_channel(targets[1]) as channel:
            session = Session(channel)
            rng = random.Random(3)
            until = time.monotonic() + settings.limit_s
            for number in range(settings.rounds + 1):
                for num_tokens in settings.lengths if number else [min(settings.lengths)]:
                    if time.monotonic() > until:
                        return
                    local = await session.ask(_tokens(rng, num_tokens), None)
                    pushed = await session.ask(_tokens(rng, num_tokens), targets[0])
                    if number:
                        times = local.prefill_s, pushed.prefill_s, pushed.transfer_exposed_s
                        yield Sample(num_tokens, *times, pushed.transport)


class Session:
    """A gateway's session with a decode worker, one request at a time."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = worker_pb2_grpc.DecodeStub(channel)  # the stubs know sync calls only
        self._call = stub.Session()
        self._is_attached = False
        self._number = 0

    async def ask(self, token_ids: list[int], prefill: str | None) -> worker_pb2.SequenceFinished:
        """Generate two tokens, so that the sequence joins the decode batch; return the summary."""
        if not self._is_attached:
            await self._call.write(worker_pb2.DecodeCommand(attach=worker_pb2.Attach(gateway_id="bench")))
            self._is_attached = True
        self._number += 1
        start = worker_pb2.StartRequest(
            request_id=f"r{self._number}",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=common_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        )
        if prefill is not None:
            start.prefill.CopyFrom(worker_pb2.PrefillTarget(worker_id="prefill-0", address=prefill))
        await self._call.write(worker_pb2.DecodeCommand(start=start))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                for output in (await self._call.read()).outputs:
                    if output.HasField("error"):
                        raise RuntimeError(output.error.message)
                    if output.HasField("finished"):
                        finished: worker_pb2.SequenceFinished = output.finished
                        return finished


@contextlib.contextmanager
def _worker(settings: PairSettings, role: Any) -> Iterator[str]:
    """Run a worker and yield its address."""
    number = 0 if role == "prefill" else 1
    worker = BareWorker(role, settings.hosts[number], settings.model_dir, settings.overrides)
    prefix = settings.prefill_prefix if role == "prefill" else []
    process = subprocess.Popen([*prefix, *worker.command()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"the {role} worker did not start")
        yield address
    finally:
        process.communicate(timeout=STOP_TIMEOUT_S)


def _tokens(rng: random.Random, count: int) -> list[int]:
    """Return a prompt that nobody has cached."""
    return [rng.randrange(VOCAB_FROM, VOCAB_TO) for _ in range(count)]


async def _print_samples(settings: PairSettings) -> None:
    async for sample in measure(settings):
        print(json.dumps(asdict(sample)), flush=True)  # noqa: T201  # to whoever started this process


def main() -> None:
    """Read the settings and measure."""
    asyncio.run(_print_samples(PairSettings(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
