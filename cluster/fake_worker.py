"""A worker without a model, over real gRPC: for tests of router and gateway, and for measuring what the gateway costs.

Its tokens come from a script, by default an echo of the prompt. Tests pause it, make it refuse, fall silent or die.
"""

# ruff: noqa: N802 - the protocol's names

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import grpc
import grpc.aio

from baton_pb.v1 import common_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc
from cluster.fake_sequences import TRANSPORT, FakeSequence, FakeSession, Script, echo, summary
from common.chain_hash import probe
from common.errors import BatonError
from common.rpc import bind, make_server, open_channel
from common.status import error_from_rpc, error_to_pb, rpc_errors_to_status

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What the handshake says."""

    model_id: str = "fake"
    block_tokens: int = 4
    num_blocks: int = 1024
    context_tokens: int = 512
    dtype: str = "float32"
    hash_probe: bytes | None = None
    """None: the right one."""
    generation: int = 1
    running_max: int = 0
    """Sequences beyond which the router takes it for full; 0: never."""
    eos_token_ids: frozenset[int] = frozenset()
    """What ends its sequences."""


@dataclass(slots=True, eq=False)
class _Watch:
    reports: asyncio.Queue[list[worker_pb2.CacheEvent]] = field(default_factory=lambda: asyncio.Queue(1024))


class FakeWorker:
    """One fake worker of any role. Owned by one asyncio loop; create it with `start`."""

    def __init__(self, worker_id: str, role: "worker_pb2.WorkerRole.ValueType", model: FakeModel) -> None:
        self.worker_id = worker_id
        self.role = role
        self.model = model
        self.address = ""
        self.script: Script = echo
        self.step_s = 0.0
        """Pause between two steps; a first token does not wait for one."""
        self.load = worker_pb2.LoadReport()
        """What it reports; `report` sends it at once."""
        self.held: set[bytes] = set()
        """The hashes that its snapshots name."""
        self.started: list[worker_pb2.StartRequest] = []
        """All requests that it has taken."""
        self.prefilled: list[worker_pb2.PrefillRequest] = []
        self.cancelled: list[str] = []
        """Ids of sequences that were cancelled, or whose gateway left."""
        self.num_watches = 0
        self.num_sessions = 0
        self.may_step = asyncio.Event()
        """Cleared: no sequence gets a token, and no prompt is prefilled."""
        self.may_step.set()
        self.is_silent = False
        """True: no report is sent, as if the process hung."""
        self.sequence_started = asyncio.Event()
        """Set when a request arrives; a test may clear it."""
        self._refusals: list[BatonError] = []
        self._number = 0
        self._sessions: set[FakeSession] = set()
        self._watches: set[_Watch] = set()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._prefills: set[asyncio.Task[None]] = set()
        self._server = make_server()

    @classmethod
    async def start(
        cls,
        worker_id: str,
        role: "worker_pb2.WorkerRole.ValueType",
        model: FakeModel | None = None,
        address: str = "127.0.0.1:0",
    ) -> Self:
        """Serve at `address` (port 0: any free one)."""
        worker = cls(worker_id, role, model or FakeModel())
        service = _FakeService(worker)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, worker._server)
        worker_pb2_grpc.add_DecodeServicer_to_server(service, worker._server)
        worker_pb2_grpc.add_PrefillServicer_to_server(service, worker._server)
        host, _, port = address.rpartition(":")
        worker.address = bind(worker._server, host, int(port))
        await worker._server.start()
        return worker

    async def kill(self) -> None:
        """Die: all connections break, nothing is said."""
        await self._server.stop(None)
        for task in self._prefills:
            task.cancel()
        for channel in self._channels.values():
            await channel.close(None)

    stop = kill

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return sum(len(session.sequences) for session in self._sessions)

    @property
    def num_tokens(self) -> int:
        """Tokens made for the sequences that have not ended."""
        return sum(one.count for session in self._sessions for one in session.sequences.values())

    def step(self) -> None:
        """Give each sequence its next token now, whatever `step_s`."""
        for session in self._sessions:
            session.hurry()

    def refuse(self, *errors: BatonError) -> None:
        """Answer the next requests (to start or to prefill) with these errors."""
        self._refusals.extend(errors)

    def store(self, *hashes: bytes, skip: int = 0) -> None:
        """Announce prefixes; `skip` numbers are left out before, as if their events were lost."""
        self.held.update(hashes)
        self._announce(True, hashes, skip)

    def evict(self, *hashes: bytes) -> None:
        """Take prefixes back."""
        self.held.difference_update(hashes)
        self._announce(False, hashes, 0)

    def report(self) -> None:
        """Send the load to all watchers."""
        for watch in self._watches:
            watch.reports.put_nowait([])

    def _announce(self, stored: bool, hashes: Iterable[bytes], skip: int) -> None:
        self._number += 1 + skip
        event = worker_pb2.CacheEvent(number=self._number, stored=stored, hashes=hashes)
        for watch in self._watches:
            watch.reports.put_nowait([event])

    # What its service does.

    def handshake(self) -> worker_pb2.HandshakeReply:
        """Return what is true of it."""
        model = self.model
        return worker_pb2.HandshakeReply(
            worker_id=self.worker_id,
            role=self.role,
            generation=model.generation,
            model_id=model.model_id,
            layout=transfer_pb2.BlockLayout(
                model_id=model.model_id, dtype=model.dtype, block_tokens=model.block_tokens, num_layers=1
            ),
            hash_probe=probe(model.block_tokens) if model.hash_probe is None else model.hash_probe,
            num_blocks=model.num_blocks,
            context_tokens=model.context_tokens,
            backend="fake",
            limits=worker_pb2.WorkerLimits(running_max=model.running_max),
        )

    async def reports(self, heartbeat_s: float) -> AsyncIterator[worker_pb2.WorkerReport]:
        """Yield a snapshot, then changes and heartbeats."""
        self.num_watches += 1
        watch, number = _Watch(), 1
        self._watches.add(watch)
        try:
            yield worker_pb2.WorkerReport(number=1, snapshot=worker_pb2.CacheSnapshot(hashes=self.held), load=self.load)
            while True:
                try:
                    events = await asyncio.wait_for(watch.reports.get(), heartbeat_s)
                except TimeoutError:
                    events = []
                if self.is_silent:
                    continue
                number += 1
                yield worker_pb2.WorkerReport(number=number, events=events, load=self.load)
        finally:
            self._watches.discard(watch)

    def take_refusal(self) -> BatonError | None:
        """Return the error that is due, if any."""
        return self._refusals.pop(0) if self._refusals else None

    def open(self) -> FakeSession:
        """Begin a session."""
        self.num_sessions += 1
        session = FakeSession()
        self._sessions.add(session)
        return session

    def close(self, session: FakeSession) -> None:
        """End a session, and its sequences."""
        self._sessions.discard(session)
        self.cancelled.extend(session.sequences)
        session.sequences.clear()
        session.eager.clear()

    def take(self, session: FakeSession, command: worker_pb2.DecodeCommand) -> None:
        """Carry out a command."""
        match command.WhichOneof("command"):
            case "start":
                self._start(session, command.start)
            case "cancel":
                self._cancel(session, command.cancel)
            case "batch":
                for one in command.batch.commands:
                    self.take(session, one)

    def tokens_after(self, token_ids: Sequence[int], num_prompt_tokens: int) -> Iterator[int]:
        """Return what follows a prompt and the output so far."""
        return islice(self.script(token_ids[:num_prompt_tokens]), len(token_ids) - num_prompt_tokens, None)

    def _start(self, session: FakeSession, request: worker_pb2.StartRequest) -> None:
        self.started.append(request)
        self.sequence_started.set()
        if refusal := self.take_refusal():
            session.emit(worker_pb2.SequenceOutput(request_id=request.request_id, error=error_to_pb(refusal)))
            return
        tokens = self.tokens_after(list(request.token_ids), request.num_prompt_tokens)
        num_generated = len(request.token_ids) - request.num_prompt_tokens
        if num_generated == request.sampling.max_tokens:  # it moved here after its last token
            finished = summary(common_pb2.FINISH_REASON_LENGTH)
            session.emit(worker_pb2.SequenceOutput(request_id=request.request_id, finished=finished))
            return
        sequence = FakeSequence(request.request_id, tokens, request.sampling, self.model.eos_token_ids, num_generated)
        session.add(sequence)
        if request.HasField("prefill"):
            sequence.waits_for_prefill = True
            task = asyncio.create_task(self._prefill(session, sequence, request))
            self._prefills.add(task)
            task.add_done_callback(self._prefills.discard)

    def _cancel(self, session: FakeSession, request: worker_pb2.CancelRequest) -> None:
        if not session.remove(request.request_id):
            return
        self.cancelled.append(request.request_id)
        if request.wants_summary:
            ended = summary(common_pb2.FINISH_REASON_CANCELLED)
            session.emit(worker_pb2.SequenceOutput(request_id=request.request_id, finished=ended))

    async def _prefill(self, session: FakeSession, sequence: FakeSequence, request: worker_pb2.StartRequest) -> None:
        """Let the prefill worker prefill; its error becomes the sequence's."""
        address = request.prefill.address
        channel = self._channels.setdefault(address, open_channel(address))
        call = worker_pb2_grpc.PrefillStub(channel).Prefill(
            worker_pb2.PrefillRequest(
                request_id=request.request_id,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
            )
        )
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            if session.remove(request.request_id):
                found = error_to_pb(error_from_rpc(error))
                session.emit(worker_pb2.SequenceOutput(request_id=request.request_id, error=found))
            return
        sequence.waits_for_prefill = False
        session.changed.set()


class _FakeService(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.DecodeServicer, worker_pb2_grpc.PrefillServicer):
    """The three services of one fake worker."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Handshake(self, request: worker_pb2.HandshakeRequest, context: _Context) -> worker_pb2.HandshakeReply:  # noqa: ARG002
        """Say who this is."""
        return self._worker.handshake()

    async def Watch(self, request: worker_pb2.WatchRequest, context: _Context) -> None:  # type: ignore[override]
        """Report."""
        async for report in self._worker.reports(request.heartbeat_s):
            await context.write(report)

    async def Drain(self, request: worker_pb2.DrainRequest, context: _Context) -> worker_pb2.DrainReply:  # noqa: ARG002
        """Say that no new request should come."""
        self._worker.load.draining = True
        self._worker.report()
        return worker_pb2.DrainReply(unfinished=self._worker.num_running)

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: _Context) -> None:  # type: ignore[override]
        """Give the first token."""
        async with rpc_errors_to_status(context):
            self._worker.prefilled.append(request)
            if refusal := self._worker.take_refusal():
                raise refusal
            await self._worker.may_step.wait()
            token_id = next(self._worker.tokens_after(list(request.token_ids), request.num_prompt_tokens))
            token = common_pb2.SampledToken(token_id=token_id)
            await context.write(worker_pb2.PrefillUpdate(first_token=worker_pb2.FirstToken(token=token)))
            await context.write(worker_pb2.PrefillUpdate(pushed=worker_pb2.Pushed(transport=TRANSPORT)))

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.DecodeCommand], context: _Context
    ) -> None:
        """Serve one gateway."""
        session = self._worker.open()
        writer = asyncio.create_task(self._write(session, context))
        try:
            async for command in request_iterator:
                self._worker.take(session, command)
        finally:
            writer.cancel()
            self._worker.close(session)

    async def _write(self, session: FakeSession, context: _Context) -> None:
        """Give each sequence its first token at once and each further one a step later; what is due is one message."""
        worker, loop = self._worker, asyncio.get_running_loop()
        next_step_s = loop.time()
        while True:
            outputs, session.outputs = session.outputs, []
            if worker.may_step.is_set():
                is_due = loop.time() >= next_step_s
                outputs += session.step(is_due)
                if is_due:
                    next_step_s = loop.time() + worker.step_s
            if outputs:
                await context.write(worker_pb2.DecodeStep(outputs=outputs))
                await asyncio.sleep(0)
                continue
            session.changed.clear()
            may_step = worker.may_step.is_set()
            either = {asyncio.ensure_future(session.changed.wait())}
            if not may_step:
                either.add(asyncio.ensure_future(worker.may_step.wait()))
            limit_s = max(0.0, next_step_s - loop.time()) if may_step and session.is_decoding else None
            try:
                await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for future in either:
                    future.cancel()
