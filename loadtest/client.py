"""One request, timed: to Baton over gRPC, or to any OpenAI-compatible server over HTTP."""

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import grpc

from baton_pb.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from cluster.asking import error_at
from common.errors import BatonError, NotFoundError, WorkerLostError
from common.status import typed_rpc_errors
from loadtest.content import ChatPrompt, Prompt, TextPrompt, TokenPrompt, token_ids
from loadtest.records import RequestRecord, ServerTiming, Slo

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a load must know of the model it is sent to."""

    id: str
    context_tokens: int
    vocab_tokens: int


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request as the client sends it."""

    request_id: str
    prompt: Prompt
    output_tokens: int
    ignore_eos: bool
    timeout_s: float
    seed: int
    targets: Slo | None = None
    """What it asks of the service; for Baton only."""


@dataclass(slots=True)
class StreamLog:
    """One stream as it comes in. Belongs to the task that reads the stream."""

    token_times: list[float] = field(default_factory=list)
    """One for each token, on the monotonic clock."""
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    transport: str | None = None
    server: ServerTiming | None = None

    def add(self, count: int) -> None:
        """Note that `count` tokens have just come."""
        self.token_times += [time.monotonic()] * count

    def record(
        self,
        request: ClientRequest,
        session: int,
        turn: int,
        intended: float,
        sent: float,
        error: BatonError | None,
        start: float,
    ) -> RequestRecord:
        """Return the record, its times counted from `start`; the three given times are of the monotonic clock."""
        times = [at - start for at in self.token_times]
        return RequestRecord(
            request_id=request.request_id,
            session=session,
            turn=turn,
            intended_s=intended - start,
            sent_s=sent - start,
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            end_s=time.monotonic() - start,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens or len(times),
            cached_tokens=self.cached_tokens,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
            finish_reason=self.finish_reason,
            error=None if error is None else type(error).__name__,
            error_message="" if error is None else error.message,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            transport=self.transport,
            server=self.server,
        )


class Target(Protocol):
    """A server under load."""

    async def model(self) -> ServedModel:
        """Ask what is served.

        Raises:
            BatonError: the server does not answer, or serves nothing.
        """
        ...

    async def generate(self, request: ClientRequest, log: StreamLog) -> None:
        """Send the request and write the stream into `log` until it ends.

        Raises:
            BatonError: the request failed; `log` holds what came before.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class BatonTarget:
    """Baton's own gRPC API. Several channels, since one connection carries a limited number of streams."""

    def __init__(
        self, address: str, vocab_tokens: int | None = None, channels: int = 4, key: str | None = None
    ) -> None:
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        # Without this option, channels to one address share one connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(channels)]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._sent = 0
        self._address = address
        self._vocab_tokens = vocab_tokens or 0

    async def model(self) -> ServedModel:
        """Ask what is served."""
        try:
            reply = await self._stubs[0].ListModels(
                inference_pb2.ListModelsRequest(), timeout=30, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise error_at(self._address, error) from error
        if not reply.models:
            raise NotFoundError(f"{self._address} serves no model")
        served = reply.models[0]
        self._vocab_tokens = self._vocab_tokens or served.vocab_tokens
        return ServedModel(served.id, served.context_tokens, self._vocab_tokens)

    async def generate(self, request: ClientRequest, log: StreamLog) -> None:
        """Send the request and write the stream into `log` until it ends."""
        stub = self._stubs[self._sent % len(self._stubs)]
        self._sent += 1
        finished = False
        with typed_rpc_errors():
            async for response in stub.Generate(
                self._encode(request), timeout=request.timeout_s, metadata=self._metadata
            ):
                if response.token_ids:
                    log.add(len(response.token_ids))
                    log.token_ids += response.token_ids
                if response.text:
                    log.text.append(response.text)
                if response.HasField("finished"):
                    finished = True
                    _note_finished(response.finished, log)
        if not finished:
            raise WorkerLostError("the stream ended without a last message")

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels:
            await channel.close(grace=None)

    def _encode(self, request: ClientRequest) -> inference_pb2.GenerateRequest:
        message = inference_pb2.GenerateRequest(
            request_id=request.request_id,
            sampling=common_pb2.SamplingParams(
                max_tokens=request.output_tokens, temperature=0, ignore_eos=request.ignore_eos, seed=request.seed
            ),
        )
        if request.targets is not None:
            message.ttft_target_s, message.tpot_target_s = request.targets.ttft_s, request.targets.tpot_s
        match request.prompt:
            case TokenPrompt():
                message.token_ids.ids.extend(token_ids(request.prompt, self._vocab_tokens))
            case TextPrompt(text):
                message.text = text
            case ChatPrompt(messages):
                for item in messages:
                    message.chat.messages.add(role=item.role, content=item.content)
        return message


def _note_finished(finished: inference_pb2.Finished, log: StreamLog) -> None:
    timing, placement, usage = finished.timing, finished.placement, finished.usage
    log.finish_reason = _REASONS.get(finished.reason, "unspecified")
    log.prompt_tokens, log.output_tokens = usage.prompt_tokens, usage.output_tokens
    log.cached_tokens = usage.cached_tokens
    log.decode_worker = placement.decode_worker_id or None
    local = log.decode_worker
    log.prefill_worker = placement.prefill_worker_id if placement.HasField("prefill_worker_id") else local
    log.transport = placement.transport or None
    log.server = ServerTiming(
        timing.ttft_s, timing.queue_s, timing.prefill_s, timing.transfer_exposed_s, timing.first_decode_s
    )
