"""The asynchronous client of the gateway's gRPC API.

async with AsyncClient("127.0.0.1:50051") as client:
    async for part in client.generate(chat_request("Why is the sky blue?", {"max_tokens": 40})):
        print(part.text, end="", flush=True)
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
import grpc.aio

from baton_pb.v1 import inference_pb2, inference_pb2_grpc
from cluster.asking import (
    CALL_TIMEOUT_S,
    OPTIONS,
    USUAL_RETRIES,
    Answer,
    Retries,
    addresses_of,
    answers_of,
    error_at,
    in_turn,
)
from common.errors import BatonError


class _Gateway(NamedTuple):
    """One of those that may be asked."""

    address: str
    channel: grpc.aio.Channel
    inference: Any  # the stubs' asynchronous type is generic in ways that cannot be named


class AsyncClient:
    """Connections to one gateway or several, for any number of requests at once. Owned by one loop.

    Args and errors are those of `cluster.client.Client`.
    """

    def __init__(
        self, address: str, key: str | None = None, ca: bytes | None = None, retries: Retries = USUAL_RETRIES
    ) -> None:
        self.address = address
        self._gateways = [_connect(one, ca) for one in addresses_of(address)]
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._retries = retries
        self._turn = count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; running calls are cancelled."""
        for gateway in self._gateways:
            await gateway.channel.close(None)

    async def ask(self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None) -> Answer:
        """Send a request and return the whole answer, the first one if it asks for several.

        Raises:
            BatonError: as for `generate`.
        """
        return (await self.ask_all(request, timeout_s))[0]

    async def ask_all(self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None) -> list[Answer]:
        """Send a request and return its answers, `n` for each prompt.

        Raises:
            BatonError: as for `generate`.
        """
        return answers_of([response async for response in self.generate(request, timeout_s)], request)

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Send a request and yield what comes back, as `cluster.client.Client.generate` does.

        Raises:
            BatonError: with the class and the words that the cluster gave; `WorkerLostError` if it cannot be reached.
        """
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        for attempt, gateway in enumerate(self._in_turn(), 1):
            has_begun = False
            try:
                async with aclosing(self._stream(gateway, request, deadline)) as responses:
                    async for response in responses:
                        has_begun = True
                        yield response
                return
            except BatonError as error:
                wait_s = None if has_begun else self._retries.wait_s(attempt, error, _left_s(deadline))
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)

    async def model_id(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Return the name of what is served; empty: nothing that the key may use.

        Raises:
            BatonError: as for `generate`.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        for attempt, gateway in enumerate(self._in_turn(), 1):
            try:
                listed = await gateway.inference.ListModels(
                    inference_pb2.ListModelsRequest(), timeout=_left_s(deadline), metadata=self._metadata
                )
                return str(listed.models[0].id) if listed.models else ""
            except grpc.RpcError as error:
                found = error_at(gateway.address, error)
                wait_s = self._retries.wait_s(attempt, found, _left_s(deadline))
                if wait_s is None:
                    raise found from error
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def _stream(
        self, gateway: _Gateway, request: inference_pb2.GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        call = gateway.inference.Generate(request, timeout=_left_s(deadline), metadata=self._metadata)
        has_begun = False
        try:
            async for response in call:
                has_begun = True
                yield response
        except grpc.RpcError as error:
            raise error_at(gateway.address, error, has_begun) from error
        finally:
            call.cancel()

    def _in_turn(self) -> Iterator[_Gateway]:
        return in_turn(self._gateways, next(self._turn))


def _connect(address: str, ca: bytes | None) -> _Gateway:
    if ca is None:
        channel = grpc.aio.insecure_channel(address, options=OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=OPTIONS)
    return _Gateway(address, channel, inference_pb2_grpc.InferenceStub(channel))


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
