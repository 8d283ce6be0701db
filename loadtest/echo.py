"""An Inference server that answers at once with made-up tokens: what the client alone can do is measured against it.

All its streams get their next token in the same step, as those of a worker do.
"""

# ruff: noqa: N802, ARG002 - names and signatures of the methods are gRPC's

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import grpc

from baton_pb.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from common.errors import InvalidRequestError
from common.status import rpc_errors_to_status

VOCAB_TOKENS = 4096
CONTEXT_TOKENS = 8192
_Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


@dataclass(frozen=True, slots=True)
class EchoTimes:
    """How slowly to echo; seconds."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    """Between two steps; a stream's first token waits for none."""


class _Steps:
    """Wakes all that wait for the next step. Owned by one loop; no timer runs while nobody waits."""

    def __init__(self, tpot_s: float) -> None:
        self.tpot_s = tpot_s
        self._waiting: list[asyncio.Future[None]] = []
        self._last_s = 0.0

    async def next(self) -> None:
        """Wait for the next step; at once, if steps take no time."""
        if not self.tpot_s:
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_at(max(self._last_s + self.tpot_s, loop.time()), self._step)
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _step(self) -> None:
        self._last_s = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class EchoService(inference_pb2_grpc.InferenceServicer):
    """Answers a prompt by ids with its own ids in turn, one message for each token; any other prompt with zeros."""

    def __init__(self, times: EchoTimes) -> None:
        self._times = times
        self._steps = _Steps(times.tpot_s)

    def set_tpot(self, tpot_s: float) -> None:
        """Change the time between two steps."""
        self._steps.tpot_s = tpot_s

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Stream `max_tokens` tokens (16 if unset)."""
        async with rpc_errors_to_status(context):
            prompt = request.token_ids.ids or [0]
            if len(prompt) > CONTEXT_TOKENS:
                raise InvalidRequestError(f"prompt of {len(prompt)} tokens, the window has {CONTEXT_TOKENS}")
            count = request.sampling.max_tokens or 16
            await asyncio.sleep(self._times.ttft_s)
            for number in range(count):
                if number:
                    await self._steps.next()
                yield inference_pb2.GenerateResponse(
                    request_id=request.request_id, text="x ", token_ids=[prompt[number % len(prompt)]]
                )
            yield inference_pb2.GenerateResponse(
                request_id=request.request_id, finished=self._finished(len(prompt), count)
            )

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: object,
    ) -> inference_pb2.ListModelsResponse:
        """Name the echo."""
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.ModelInfo(id="echo", context_tokens=CONTEXT_TOKENS, vocab_tokens=VOCAB_TOKENS)]
        )

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: _Context,
    ) -> inference_pb2.TokenizeResponse:
        """Refuse: the echo has no tokenizer."""
        async with rpc_errors_to_status(context):
            raise InvalidRequestError("the echo has no tokenizer")
        raise AssertionError("unreachable")

    async def Detokenize(
        self,
        request: inference_pb2.DetokenizeRequest,
        context: _Context,
    ) -> inference_pb2.DetokenizeResponse:
        """Refuse: the echo has no tokenizer."""
        async with rpc_errors_to_status(context):
            raise InvalidRequestError("the echo has no tokenizer")
        raise AssertionError("unreachable")

    def _finished(self, prompt_tokens: int, count: int) -> inference_pb2.Finished:
        return inference_pb2.Finished(
            reason=common_pb2.FINISH_REASON_LENGTH,
            usage=common_pb2.Usage(prompt_tokens=prompt_tokens, output_tokens=count),
            timing=common_pb2.Timing(ttft_s=self._times.ttft_s, prefill_s=self._times.ttft_s),
            placement=common_pb2.Placement(decode_worker_id="echo", transport="local"),
        )


class EchoServer:
    """The echo behind a real gRPC server on a port of its own."""

    def __init__(self, server: grpc.aio.Server, address: str, service: EchoService) -> None:
        self.address = address
        self.service = service
        self._server = server

    @classmethod
    async def start(cls, times: EchoTimes = EchoTimes(), port: int = 0) -> Self:
        """Listen on 127.0.0.1; port 0 takes any free one."""
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        service = EchoService(times)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return cls(server, f"127.0.0.1:{bound}", service)

    async def stop(self) -> None:
        """Cancel what runs and close the port."""
        await self._server.stop(grace=None)

    async def wait(self) -> None:
        """Serve until stopped."""
        await self._server.wait_for_termination()


async def _serve() -> None:
    server = await EchoServer.start()
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    await server.wait()


if __name__ == "__main__":
    asyncio.run(_serve())
