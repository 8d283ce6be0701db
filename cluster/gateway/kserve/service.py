"""The face for Triton's clients: a request becomes one of ours, its deltas become tensors."""

# ruff: noqa: N802 - the protocol's names

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import grpc.aio

from baton_pb.kserve import inference_pb2 as kserve_pb2
from baton_pb.kserve import inference_pb2_grpc as kserve_pb2_grpc
from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.bugs import bugs_to_errors
from cluster.gateway.choices import choices_of, pieces_of
from cluster.gateway.deadline import Deadline
from cluster.gateway.generate import Generator
from cluster.gateway.kserve.asking import Asked, read_request
from cluster.gateway.kserve.tensors import Tensor, add_outputs
from cluster.gateway.permissions import may_use
from cluster.gateway.progress import Delta
from cluster.gateway.ready import readiness
from cluster.gateway.router_client import RouterClient
from cluster.tenants.callers import CALLER
from cluster.tenants.door import Door
from common.errors import BatonError
from common.status import rpc_errors_to_status

_Context = grpc.aio.ServicerContext[Any, Any]
_Responses = asyncio.Queue[kserve_pb2.ModelStreamInferResponse | BatonError | None]
_PLATFORM = "baton"
_RUNNING_MAX = 64
"""Requests of one stream that run at once; further ones wait unread."""
_WAITING_MAX = 64
"""Answers of one stream that wait for the client."""
_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
_INPUTS = (
    ("text_input", "BYTES"),
    ("stream", "BOOL"),
    ("sampling_parameters", "BYTES"),
    ("exclude_input_in_output", "BOOL"),
    ("max_tokens", "INT32"),
    ("temperature", "FP32"),
    ("top_k", "INT32"),
    ("top_p", "FP32"),
    ("seed", "UINT64"),
    ("stop_words", "BYTES"),
)
_OUTPUTS = (
    ("text_output", "BYTES"),
    ("finish_reason", "BYTES"),
    ("num_input_tokens", "UINT32"),
    ("num_output_tokens", "UINT32"),
)


class KserveService(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """The Open Inference Protocol. Owned by the gateway's loop."""

    def __init__(self, generator: Generator, router: RouterClient, door: Door) -> None:
        self._door = door
        self._generator = generator
        self._router = router

    async def ServerLive(
        self,
        request: kserve_pb2.ServerLiveRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> kserve_pb2.ServerLiveResponse:
        """Say that the gateway lives."""
        return kserve_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self,
        request: kserve_pb2.ServerReadyRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> kserve_pb2.ServerReadyResponse:
        """Say whether a request could be placed."""
        return kserve_pb2.ServerReadyResponse(ready=await self._is_ready())

    async def ModelReady(
        self,
        request: kserve_pb2.ModelReadyRequest,
        context: _Context,  # noqa: ARG002
    ) -> kserve_pb2.ModelReadyResponse:
        """Say whether this is the served model, and could be asked by this caller."""
        model_id = self._generator.limits().model_id
        is_served = request.name == model_id and may_use(model_id, CALLER.get())
        return kserve_pb2.ModelReadyResponse(ready=is_served and await self._is_ready())

    async def ServerMetadata(
        self,
        request: kserve_pb2.ServerMetadataRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> kserve_pb2.ServerMetadataResponse:
        """Name the server."""
        return kserve_pb2.ServerMetadataResponse(name=_PLATFORM, version=metadata.version("baton-serve"))

    async def ModelMetadata(
        self, request: kserve_pb2.ModelMetadataRequest, context: _Context
    ) -> kserve_pb2.ModelMetadataResponse:
        """Name the model's tensors."""
        async with rpc_errors_to_status(context):
            self._generator.check_model(request.name)
        kind = kserve_pb2.ModelMetadataResponse.TensorMetadata
        return kserve_pb2.ModelMetadataResponse(
            name=self._generator.limits().model_id,
            versions=["1"],
            platform=_PLATFORM,
            inputs=[kind(name=name, datatype=datatype, shape=[1]) for name, datatype in _INPUTS],
            outputs=[kind(name=name, datatype=datatype, shape=[-1]) for name, datatype in _OUTPUTS],
        )

    async def ModelInfer(
        self, request: kserve_pb2.ModelInferRequest, context: _Context
    ) -> kserve_pb2.ModelInferResponse:
        """Answer in one piece."""
        request_id = _request_id()
        async with rpc_errors_to_status(context):
            with bugs_to_errors(request_id):
                asked = read_request(request, may_stream=False)
                async with aclosing(self._answers(request, asked, request_id, context.time_remaining())) as answers:
                    return await anext(answers)
        raise AssertionError("unreachable")

    async def ModelStreamInfer(  # type: ignore[override]
        self, request_iterator: AsyncIterator[kserve_pb2.ModelInferRequest], context: _Context
    ) -> None:
        """Answer all requests of a stream, side by side. One that fails says so in its answer; the others go on."""
        responses: _Responses = asyncio.Queue(_WAITING_MAX)
        async with rpc_errors_to_status(context), _running(self._read(request_iterator, responses, context)):
            while isinstance(response := await responses.get(), kserve_pb2.ModelStreamInferResponse):
                await context.write(response)
            if response is not None:
                raise response

    async def _read(
        self, requests: AsyncIterator[kserve_pb2.ModelInferRequest], responses: _Responses, context: _Context
    ) -> None:
        """Start what the client asks for, so many at once, until it asks no more and all is answered.

        The last thing put is None, or the error that ended the client's side.
        """
        room, error = asyncio.Semaphore(_RUNNING_MAX), None
        async with asyncio.TaskGroup() as group:
            try:
                with bugs_to_errors("stream"):
                    is_first = True  # it was admitted with the call
                    async for request in requests:
                        await room.acquire()
                        task = group.create_task(self._serve(request, responses, context.time_remaining(), is_first))
                        is_first = False
                        task.add_done_callback(lambda _: room.release())
            except BatonError as caught:
                error = caught
        await responses.put(error)

    async def _serve(
        self, request: kserve_pb2.ModelInferRequest, responses: _Responses, timeout_s: float | None, is_first: bool
    ) -> None:
        request_id = _request_id()
        try:
            with bugs_to_errors(request_id):
                if not is_first:
                    await self._door.admit_next()
                asked = read_request(request, may_stream=True)
                async with aclosing(self._answers(request, asked, request_id, timeout_s)) as answers:
                    async for answer in answers:
                        await responses.put(kserve_pb2.ModelStreamInferResponse(infer_response=answer))
        except BatonError as error:
            failed = kserve_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
            await responses.put(kserve_pb2.ModelStreamInferResponse(error_message=error.message, infer_response=failed))

    async def _answers(
        self, request: kserve_pb2.ModelInferRequest, asked: Asked, request_id: str, timeout_s: float | None
    ) -> AsyncGenerator[kserve_pb2.ModelInferResponse, None]:
        """Yield the parts of an answer, or all of it."""
        limit_s = min(timeout_s or math.inf, asked.timeout_s or math.inf, self._generator.request_s)
        streams = choices_of(self._generator.generate, [asked.message], request_id, limit_s)
        choices = [_Choice() for _ in streams]
        async with Deadline(limit_s), pieces_of(streams) as pieces:
            async for piece in pieces:
                choices[piece.index].take(piece.delta)
                is_last = all(choice.finished is not None for choice in choices)
                if asked.streams and (piece.delta.text or is_last):
                    yield self._answer(request, asked, choices, is_last and not asked.ends_empty)
        if not asked.streams:
            yield self._answer(request, asked, choices, is_last=True)
        elif asked.ends_empty:
            empty = kserve_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
            empty.parameters["triton_final_response"].bool_param = True
            yield empty

    def _answer(
        self, request: kserve_pb2.ModelInferRequest, asked: Asked, choices: "Sequence[_Choice]", is_last: bool
    ) -> kserve_pb2.ModelInferResponse:
        """Return what the choices have that was not told yet."""
        answer = kserve_pb2.ModelInferResponse(
            model_name=self._generator.limits().model_id, model_version="1", id=request.id
        )
        answer.parameters["triton_final_response"].bool_param = is_last
        before = asked.message.text if asked.repeats_prompt else ""
        told = [choice.tell() for choice in choices]
        tensors = [
            Tensor("text_output", "BYTES", [before + text for text, _ in told]),
            Tensor("finish_reason", "BYTES", [choice.reason for choice in choices]),
            Tensor("num_input_tokens", "UINT32", [max(choice.num_prompt_tokens for choice in choices)]),
            Tensor("num_output_tokens", "UINT32", [count for _, count in told]),
        ]
        add_outputs(answer, [tensor for tensor in tensors if tensor.name in asked.outputs], asked.is_raw)
        return answer

    async def _is_ready(self) -> bool:
        try:
            self._door.check_open()
            await readiness(self._router)
        except BatonError:
            return False
        return True


@dataclass(slots=True)
class _Choice:
    """What a choice has that was not told yet."""

    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    finished: inference_pb2.Finished | None = None

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        self.finished = delta.finished
        usage_tokens = 0 if delta.finished is None else delta.finished.usage.prompt_tokens
        self.num_prompt_tokens = delta.num_prompt_tokens or usage_tokens or self.num_prompt_tokens

    def tell(self) -> tuple[str, int]:
        told = self.text, self.num_tokens
        self.text, self.num_tokens = "", 0
        return told

    @property
    def reason(self) -> str:
        return "" if self.finished is None else _REASONS.get(self.finished.reason, "abort")


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the block, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _request_id() -> str:
    return f"req-{secrets.token_hex(8)}"
