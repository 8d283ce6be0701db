"""Workers around fake engines in one process, served over real gRPC, and a gateway's end of a session."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton_pb.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from common.config import DecodeConfig, EngineConfig, PrefillConfig
from common.errors import BatonError
from common.status import error_from_pb
from decode.worker import DecodeWorker
from engine.fake import FakeEngine
from engine.grammar import Grammars
from engine.step import ScheduledChunk
from engine.tiers import BlockTiers
from kvtransfer.codecs.base import Codec
from kvtransfer.codecs.registry import CODECS
from kvtransfer.fake import FakeNetwork
from prefill.worker import PrefillWorker

LIMIT_S = 10.0


class Gate:
    """Blocks an engine's steps, as its `on_step`: open at first. `entered` counts steps that came to it."""

    def __init__(self) -> None:
        self.entered = 0
        self._loop = asyncio.get_running_loop()
        self._flow = threading.Event()
        self._flow.set()
        self._arrived = asyncio.Event()

    def __call__(self, batch: Sequence[ScheduledChunk]) -> None:
        self.entered += 1
        self._loop.call_soon_threadsafe(self._arrived.set)
        assert self._flow.wait(LIMIT_S), "the gate was never opened"

    def close(self) -> None:
        self._flow.clear()
        self._arrived.clear()

    def open(self) -> None:
        self._flow.set()

    async def arrived(self) -> None:
        """Wait until a step stands at the gate."""
        await asyncio.wait_for(self._arrived.wait(), LIMIT_S)


@dataclass
class Answer:
    """What a session has said about one request."""

    tokens: list[int] = field(default_factory=list)
    finished: worker_pb2.SequenceFinished | None = None
    error: BatonError | None = None
    samples: list[common_pb2.SampledToken] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.error is not None


class Gateway:
    """The gateway's end of one session. `answers` is filled by a reading task."""

    def __init__(self, address: str, gateway_id: str = "gateway-0", is_reading: bool = True) -> None:
        self.answers: dict[str, Answer] = {}
        self.num_messages = 0
        self.ended: asyncio.Future[grpc.aio.AioRpcError | None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Condition()
        # A deaf gateway's connection holds little, so that the worker soon feels it.
        narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        self._channel = grpc.aio.insecure_channel(address, options=[] if is_reading else narrow)
        stub: Any = worker_pb2_grpc.DecodeStub(self._channel)  # the stubs demand an iterator of requests
        self._call = stub.Session()
        self._gateway_id = gateway_id
        self._is_reading = is_reading
        self._commands: asyncio.Queue[worker_pb2.DecodeCommand] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Gateway":
        await self.send(attach=worker_pb2.Attach(gateway_id=self._gateway_id))
        self._tasks = [asyncio.create_task(self._write())]
        if self._is_reading:
            self.read()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._channel.close(None)

    def read(self) -> None:
        """Begin to read."""
        self._tasks.append(asyncio.create_task(self._read()))

    async def send(self, **command: Any) -> None:
        self._commands.put_nowait(worker_pb2.DecodeCommand(**command))

    async def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        target: PrefillWorker | worker_pb2.PrefillTarget | None = None,
        num_prompt_tokens: int | None = None,
        timeout_s: float = 0.0,
        holder: worker_pb2.PrefixHolder | None = None,
        **sampling: Any,
    ) -> None:
        if isinstance(target, PrefillWorker):
            target = worker_pb2.PrefillTarget(worker_id=target.worker_id, address=target.address)
        request = worker_pb2.StartRequest(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            sampling=common_pb2.SamplingParams(**{"temperature": 0.0, **sampling}),
            prefill=target,
            timeout_s=timeout_s,
            prefix_holder=holder,
        )
        self.answers[request_id] = Answer()
        await self.send(start=request)

    async def cancel(self, request_id: str) -> None:
        await self.send(cancel=worker_pb2.CancelRequest(request_id=request_id))

    async def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for messages that make `condition` true."""
        async with asyncio.timeout(limit_s), self._changed:
            await self._changed.wait_for(condition)

    async def over(self, *request_ids: str, limit_s: float = LIMIT_S) -> list[Answer]:
        """Wait for the end of requests."""
        answers = [self.answers[request_id] for request_id in request_ids]
        await self.until(lambda: all(answer.is_over for answer in answers), limit_s)
        return answers

    async def ask(self, request_id: str, token_ids: Sequence[int], target: Any = None, **options: Any) -> Answer:
        """Start and wait for the end."""
        await self.start(request_id, token_ids, target, **options)
        return (await self.over(request_id))[0]

    async def _write(self) -> None:
        # gRPC takes one message at a time.
        while True:
            await self._call.write(await self._commands.get())

    async def _read(self) -> None:
        try:
            async for step in self._call:
                async with self._changed:
                    self.num_messages += 1
                    for output in step.outputs:
                        self._take(output)
                    self._changed.notify_all()
            self.ended.set_result(None)
        except grpc.aio.AioRpcError as error:
            self.ended.set_result(error)

    def _take(self, output: worker_pb2.SequenceOutput) -> None:
        answer = self.answers.setdefault(output.request_id, Answer())
        answer.tokens += [token.token_id for token in output.tokens]
        answer.samples += output.tokens
        if output.HasField("finished"):
            answer.finished = output.finished
        if output.HasField("error"):
            answer.error = error_from_pb(output.error)


class Bench:
    """Workers of one test, joined by a FakeNetwork."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.workers: list[PrefillWorker | DecodeWorker] = []
        self.crashed: set[str] = set()
        self.grammars: Callable[[], Grammars] | None = None
        """Of a tokenizer whose token 0 ends outputs: workers made from now on obey grammars."""
        self.tiers: EngineConfig | None = None
        """Of the workers made from now on."""
        self.host_bytes: int | None = None
        """Size of a host tier of the workers made from now on, instead of `tiers`; and how it keeps blocks."""
        self.host_codec: Codec = CODECS["raw"]

    async def prefill(
        self, worker_id: str = "prefill-0", num_blocks: int = 64, on_step: Any = None, **config: Any
    ) -> PrefillWorker:
        engine = self._engine(worker_id, num_blocks=num_blocks, on_step=on_step)
        endpoint = self.network.endpoint(worker_id, engine.kv)  # type: ignore[arg-type]  # it needs a BlockStore only
        worker = PrefillWorker(worker_id, "127.0.0.1", engine, endpoint, PrefillConfig(**config), 0.5)
        self.workers.append(worker)
        await worker.serve()
        return worker

    async def decode(
        self,
        worker_id: str = "decode-0",
        num_blocks: int = 64,
        on_step: Any = None,
        step_s: float = 0.0,
        is_colocated: bool = False,
        **config: Any,
    ) -> DecodeWorker:
        engine = self._engine(worker_id, num_blocks=num_blocks, on_step=on_step, step_s=step_s)
        endpoint = self.network.endpoint(worker_id, engine.kv)  # type: ignore[arg-type]  # it needs a BlockStore only
        worker = DecodeWorker(worker_id, "127.0.0.1", engine, endpoint, DecodeConfig(**config), 0.5, is_colocated)
        self.workers.append(worker)
        await worker.serve()
        return worker

    def _engine(self, worker_id: str, **options: Any) -> FakeEngine:
        if self.grammars is not None:
            options |= {"eos_token_ids": frozenset({0}), "grammars": self.grammars()}
        engine = FakeEngine(**options)
        if self.tiers is not None:
            engine.open_tiers(self.tiers, worker_id, Path())
        elif self.host_bytes is not None:
            store: Any = engine.kv  # a BlockStore
            engine.tiers = BlockTiers(store, engine.pool.log, self.host_codec, self.host_bytes, None)
            engine.pool.on_evict = engine.tiers.evicted
        return engine

    async def at_rest(self) -> None:
        """Wait until no worker has a request, a used block or a transfer; each within the limit."""
        for worker in self.workers:
            if worker.worker_id not in self.crashed:
                await until_changed(worker, lambda worker=worker: is_at_rest(worker))  # type: ignore[misc]

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop(0.0)


@asynccontextmanager
async def serving() -> AsyncIterator[Bench]:
    """Give a bench; at the end assert that nothing is left: no block, no transfer, no task, no wrong KV."""
    bench = Bench()
    try:
        yield bench
        await bench.at_rest()
    finally:
        await bench.stop()
    for worker in bench.workers:
        assert isinstance(worker.engine, FakeEngine)
        worker.engine.pool.check()
        assert worker.engine.pool.num_used == 0
        assert worker.engine.kv_faults == []
        assert worker.loop.runner.num_tasks == 0
    leftover = [task.get_name() for task in asyncio.all_tasks() if "landing" in task.get_name()]
    assert leftover == []


def is_at_rest(worker: PrefillWorker | DecodeWorker) -> bool:
    load = worker.loop.load()
    return (
        load.waiting_sequences == load.running_sequences == load.queued_tokens == 0
        and worker.engine.pool.num_used == 0
        and worker.endpoint.num_active == 0
    )


async def until_changed(worker: PrefillWorker | DecodeWorker, condition: Callable[[], bool]) -> None:
    """Wait for a change of a worker's load or pool that makes `condition` true."""
    changed = asyncio.Event()
    worker.loop.on_change(changed.set)
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            changed.clear()
            await changed.wait()
