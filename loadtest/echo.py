"""An Inference server that answers at once with made-up tokens: what the client alone can do is measured against it."""

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


class EchoService(inference_pb2_grpc.InferenceServicer):
    """Answers a prompt by ids with its own ids in turn, one message for each token; any other prompt with zeros."""

    def __init__(self, times: EchoTimes) -> None:
        self._times = times

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
                if number and self._times.tpot_s:
                    await asyncio.sleep(self._times.tpot_s)
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

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self.address = address
        self._server = server

    @classmethod
    async def start(cls, times: EchoTimes = EchoTimes(), port: int = 0) -> Self:
        """Listen on 127.0.0.1; port 0 takes any free one."""
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        inference_pb2_grpc.add_InferenceServicer_to_server(EchoService(times), server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return cls(server, f"127.0.0.1:{bound}")

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
