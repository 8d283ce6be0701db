"""The decode loop: owns the pool and every stream; admits, lands, steps, and hands each gateway its tokens."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

from baton_pb.v1 import common_pb2, worker_pb2
from common.clock import Clock
from common.config import DecodeConfig
from common.errors import (
    BatonError,
    CancelledRequestError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from common.logs import log
from common.rpc import is_address
from common.status import error_to_pb
from decode.landing import LandingRun, bring_back
from decode.prefill_calls import PrefillCalls
from decode.scheduler import DecodeScheduler, Phase, PlannedChunk
from decode.session import GatewaySession
from decode.stream import TokenStream
from engine.engine import Engine
from engine.prefix_loader import PrefixLoader
from engine.sequence import Sequence
from engine.service import LoopLoad
from engine.step import ScheduledChunk, TokenOutput
from engine.step_runner import StepRunner, Work
from kvtransfer.interface import Endpoint, LandingReport

_logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""What a refused gateway is told."""


class DecodeLoop:
    """Runs streams through the engine and sends their tokens. Plain functions on one asyncio loop.

    Every step gives each session at most one message: outputs are collected while a step's results are applied and
    sent by the sessions' writers while the next step runs.
    A stream ends exactly once, in `_end`; its blocks go back in one of three places: there, after the step that uses
    them (StepRunner.release), or when its landing is quiet (`quiet`).
    """

    def __init__(
        self,
        worker_id: str,
        engine: Engine,
        endpoint: Endpoint,
        loader: PrefixLoader,
        config: DecodeConfig,
        clock: Clock,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._endpoint = endpoint
        self._loader = loader
        self._config = config
        self._clock = clock
        self._scheduler: DecodeScheduler[TokenStream] = DecodeScheduler(
            engine, config.running_max, config.token_budget, config.itl_target_s
        )
        self._calls = PrefillCalls()
        self._sessions: dict[str, GatewaySession] = {}
        self._landings: dict[TokenStream, Work] = {}
        self._planned: list[PlannedChunk[TokenStream]] = []
        self._num_streams = 0
        self._listeners: list[Callable[[], None]] = []
        self._counters: Counter[str] = Counter()
        self._is_draining = False
        self._crash: BatonError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.runner = StepRunner(engine, self, worker_id)

    def join(self, gateway_id: str) -> GatewaySession:
        """Open a session. An older one of the same gateway ends: its connection must have been lost.

        Raises:
            InvalidRequestError: no id.
            WorkerLostError: the loop has crashed.
        """
        if self._crash is not None:
            raise self._crash
        if not gateway_id:
            raise InvalidRequestError("the first command must attach with a gateway_id")
        older = self._sessions.get(gateway_id)
        if older is not None:
            self.leave(older)
            older.end(CancelledRequestError(f"gateway {gateway_id} attached again"))
        self._sessions[gateway_id] = session = GatewaySession(gateway_id, self._config.unsent_max)
        return session

    def leave(self, session: GatewaySession) -> None:
        """Cancel all streams of a session and forget it."""
        for stream in list(session.streams.values()):
            self._end(stream)
        if self._sessions.get(session.gateway_id) is session:
            del self._sessions[session.gateway_id]

    def start(self, session: GatewaySession, request: worker_pb2.StartRequest) -> None:
        """Take a request, or answer it with an error under its id."""
        try:
            self._start(session, request)
        except BatonError as error:
            self._counters["refused_total"] += 1
            session.emit(worker_pb2.SequenceOutput(request_id=request.request_id, error=error_to_pb(error)))

    def cancel(self, session: GatewaySession, request_id: str, wants_summary: bool = False) -> None:
        """End a stream without further tokens; an unknown id is answered with an error.

        Args:
            session: the stream's.
            request_id: the stream's.
            wants_summary: whether the gateway waits for the figures of the sequence (it found a stop string).
        """
        stream = session.streams.get(request_id)
        if stream is None:
            error = NotFoundError(f"no sequence {request_id!r} in this session")
            session.emit(worker_pb2.SequenceOutput(request_id=request_id, error=error_to_pb(error)))
            return
        self._counters["cancelled_total"] += 1
        self._end(stream)
        session.forget(request_id)
        if wants_summary:
            finished = stream.finished_pb(common_pb2.FINISH_REASON_CANCELLED)
            session.emit(worker_pb2.SequenceOutput(request_id=request_id, finished=finished))

    # What the step runner asks for.

    def plan(self) -> list[ScheduledChunk]:
        """Admit what fits and return the next step's chunks."""
        self._admit()
        plan = self._scheduler.plan()
        for stream in plan.preempted:
            self._counters["preemptions_total"] += 1
            log(_logger, logging.INFO, "preempted", request_id=stream.request_id, worker_id=self._worker_id)
        self._planned, self._planned_s = plan.chunks, self._clock.now()
        for stream, _ in self._planned:
            if stream.chunk_started_s is None:
                stream.chunk_started_s = self._planned_s
        return [ScheduledChunk(stream.sequence, num_tokens) for stream, num_tokens in self._planned]

    def apply(self, batch: Seq[ScheduledChunk], outputs: Seq[TokenOutput | None]) -> None:
        """Take a step's results; those of streams that ended meanwhile are dropped."""
        self._scheduler.ran(self._planned, self._clock.now() - self._planned_s)
        for (stream, _), chunk, output in zip(self._planned, batch, outputs, strict=True):
            if stream.phase is Phase.ENDED:
                continue
            if output is not None and output.error is not None:
                self.fail(stream, output.error)
                continue
            self._engine.complete(chunk, output)
            if output is not None:
                self._take_token(stream, output.to_pb())
        self._planned = []
        self._changed()

    def crashed(self, error: BatonError) -> None:
        """Fail every stream."""
        self._crash = error
        self.fail_all(error)

    # What landings report.

    def first_token(self, stream: TokenStream, first_token: worker_pb2.FirstToken) -> bool:
        """Append the first token and send it; False: the sequence ended with it, and its landing with it."""
        token = first_token.token
        if token.token_id >= self._engine.vocab_tokens:
            raise BatonError(f"the prefill worker sent token {token.token_id} of {self._engine.vocab_tokens}")
        stream.cached_tokens = first_token.cached_tokens
        stream.prefill_s = first_token.prefill_s
        stream.prefill_device_s = first_token.device_s
        stream.sequence.append(token.token_id, self._engine.block_tokens)
        work = self._landings.pop(stream)
        self._take_token(stream, token)
        if stream.phase is Phase.ENDED:
            return False
        self._landings[stream] = work
        return True

    def landed(self, stream: TokenStream, report: LandingReport) -> None:
        """Let the stream decode; its blocks are full and final, so others may find them."""
        del self._landings[stream]
        # All but the first token, which came by message and has no KV yet.
        self._engine.advance(stream.sequence, stream.sequence.num_tokens - 1)
        self._scheduler.join(stream)
        stream.joined_s = self._clock.now()
        assert stream.first_token_s is not None
        stream.transfer_exposed_s = stream.joined_s - stream.first_token_s
        stream.transport = report.transport
        self._counters["landed_total"] += 1
        self.runner.wake()
        self._changed()

    def returned(self, stream: TokenStream, num_blocks: int) -> None:
        """Let a preempted stream go on; what it still lacks is computed."""
        del self._landings[stream]
        self._engine.advance(stream.sequence, (stream.first_block + num_blocks) * self._engine.layout.block_tokens)
        self._scheduler.join(stream)
        self._counters["preempted_blocks_restored_total"] += num_blocks
        self.runner.wake()
        self._changed()

    def fail(self, stream: TokenStream, error: BatonError) -> None:
        """End a stream with an error, if it has not ended: a landing's failure, a deadline, a crash."""
        if stream.phase is Phase.ENDED:
            return
        self._counters["failed_total"] += 1
        log(_logger, logging.WARNING, "failed", request_id=stream.request_id, worker_id=self._worker_id, error=error)
        self._end(stream)
        stream.session.emit(worker_pb2.SequenceOutput(request_id=stream.request_id, error=error_to_pb(error)))

    def landing_failed(self, stream: TokenStream, error: BatonError) -> None:
        """End a stream whose landing failed; the landing goes on until it is quiet."""
        self._landings.pop(stream, None)
        self.fail(stream, error)

    def quiet(self, stream: TokenStream) -> None:
        """Release the blocks of a stream that did not land."""
        self.runner.release(stream.sequence)
        self._admit()
        self._changed()

    # What the worker asks for.

    def load(self) -> LoopLoad:
        """Return the load of this moment."""
        scheduler = self._scheduler
        here = [stream for stream in [*scheduler.waiting, *scheduler.running] if not stream.is_remote]
        queued_tokens = sum(s.sequence.num_uncomputed for s in here if s.sequence.num_uncomputed > 1)
        running = len(scheduler.landing) + len(scheduler.running)
        counters, steps = self._counters + self._loader.counters, self.runner.count.to_pb()
        fetches = self._loader.fetches
        return LoopLoad(queued_tokens, len(scheduler.waiting), running, self._is_draining, counters, steps, fetches)

    def pool_changed(self) -> None:
        """Blocks came back, or a prefix came, from elsewhere: look at the queue again."""
        self._admit()
        self.runner.wake()
        self._changed()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the load or the pool may have changed."""
        self._listeners.append(listener)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for those here; return how many are left after `timeout_s`."""
        self._is_draining = True
        self._changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._num_streams

    def fail_all(self, error: BatonError) -> None:
        """End all streams with an error."""
        for session in list(self._sessions.values()):
            for stream in list(session.streams.values()):
                self.fail(stream, error)

    async def close(self) -> None:
        """Stop stepping and wait for landings to be quiet. All streams have ended."""
        await self.runner.stop()
        await self._calls.close()

    def _start(self, session: GatewaySession, request: worker_pb2.StartRequest) -> None:
        if self._crash is not None:
            raise self._crash
        if self._is_draining:
            raise OverloadedError(f"worker {self._worker_id} is draining", RETRY_AFTER_S)
        if not request.request_id or request.request_id in session.streams:
            raise InvalidRequestError(f"request_id {request.request_id!r} is empty or in use in this session")
        sequence = self._engine.sequence_from_pb(request)
        if (reason := self._finish_reason(sequence)) is not None:  # it moved here after its last token
            finished = worker_pb2.SequenceFinished(reason=reason)
            session.emit(worker_pb2.SequenceOutput(request_id=request.request_id, finished=finished))
            return
        self._check(sequence)
        is_remote = request.HasField("prefill") and request.prefill.worker_id != self._worker_id
        if is_remote and not is_address(request.prefill.address):
            raise InvalidRequestError(f"prefill.address must be HOST:PORT, got {request.prefill.address!r}")
        stream = TokenStream.of(sequence, session, self._clock.now(), request.prefill if is_remote else None)
        if request.timeout_s:
            error = DeadlineError(f"the request's deadline passed, {request.timeout_s:.3f} s after it came here")
            stream.timer = asyncio.get_running_loop().call_later(request.timeout_s, self.fail, stream, error)
            stream.timeout_s = request.timeout_s
        self._counters["remote_prefills_total" if is_remote else "local_prefills_total"] += 1
        session.streams[stream.request_id] = stream
        self._num_streams += 1
        self._idle.clear()
        self._scheduler.add(stream)
        self._bring_prefix(stream, request.prefix_holder if request.HasField("prefix_holder") else None)
        if not sequence.is_ready:
            self.runner.spawn(self._prepare(stream), f"grammar-{stream.request_id}")
        self._admit()
        self.runner.wake()
        self._changed()

    def _bring_prefix(self, stream: TokenStream, holder: worker_pb2.PrefixHolder | None) -> None:
        """Have blocks of the prompt brought to whoever prefills it."""
        if stream.is_remote:
            stream.prefix_holder = holder
        elif self._loader.is_worthwhile(stream.sequence, holder):
            stream.is_loading = True
            stream.loading = self.runner.spawn(self._load(stream, holder), f"prefix-{stream.request_id}")

    async def _load(self, stream: TokenStream, holder: worker_pb2.PrefixHolder | None) -> None:
        try:
            await self._loader.load(stream.sequence, holder)
        finally:
            stream.is_loading, stream.loading = False, None
            self.pool_changed()

    async def _prepare(self, stream: TokenStream) -> None:
        """Let the stream's grammar be compiled; meanwhile its prompt may land, but no step computes it."""
        try:
            await self._engine.prepare(stream.sequence)
        except BatonError as error:
            self.fail(stream, error)
        else:
            self.runner.wake()

    def _check(self, sequence: Sequence) -> None:
        """Refuse what can never be served, then what finds no place in the queue."""
        self._engine.check_request(sequence.token_ids, sequence.sampling)
        self._scheduler.check_fits(sequence.num_prompt_tokens, sequence.sampling.max_tokens)
        waiting = len(self._scheduler.waiting)
        if waiting >= self._config.waiting_max:
            raise OverloadedError(f"{waiting} sequences wait already, the limit of {self._worker_id}", RETRY_AFTER_S)

    def _admit(self) -> None:
        for stream in self._scheduler.admit():
            if stream.below:
                assert self._engine.tiers is not None
                work = bring_back(self, self._engine.tiers, stream)
            else:
                num_blocks = self._engine.blocks_for(stream.sequence.num_tokens)
                run = LandingRun(self, self._endpoint, self._calls, stream)
                work = run.run(num_blocks, stream.left_s(self._clock.now()))
            self._landings[stream] = self.runner.spawn(work, f"landing-{stream.request_id}")

    def _take_token(self, stream: TokenStream, token: common_pb2.SampledToken) -> None:
        """Note the time of a token that was just appended, send it, and end the stream if it is the last."""
        now = self._clock.now()
        if stream.first_token_s is None:
            stream.first_token_s = now
            if stream.chunk_started_s is not None:  # prefilled here
                stream.prefill_s = now - stream.chunk_started_s
                stream.joined_s = now
        elif stream.second_token_s is None:
            stream.second_token_s = now
        self._counters["tokens_total"] += 1
        output = worker_pb2.SequenceOutput(request_id=stream.request_id, tokens=[token])
        reason = self._finish_reason(stream.sequence)
        if reason is not None:
            output.finished.CopyFrom(stream.finished_pb(reason))
            self._end(stream)
        stream.session.emit(output)

    def _finish_reason(self, sequence: Sequence) -> "common_pb2.FinishReason.ValueType | None":
        reason = self._engine.finish_reason(sequence)
        if reason is None and sequence.num_output_tokens and sequence.num_tokens >= self._scheduler.capacity_tokens:
            # The pool is this worker's context window when it is smaller than the model's.
            return common_pb2.FINISH_REASON_LENGTH
        return reason

    def _end(self, stream: TokenStream) -> None:
        """Forget a stream; its blocks go back now, after the running step, or when its landing is quiet."""
        phase = stream.phase
        self._scheduler.remove(stream)
        del stream.session.streams[stream.request_id]
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.loading is not None:
            stream.loading.cancel()
        if phase is Phase.LANDING:
            work = self._landings.pop(stream, None)
            if work is not None:  # else the landing ends by itself
                work.cancel()
        else:
            self.runner.release(stream.sequence)
        self._num_streams -= 1
        if not self._num_streams:
            self._idle.set()
        self.runner.wake()
        self._changed()

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()
