"""The client of `make bench-gateway`: so many streams at once over gRPC or server-sent events, each read to its end."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np

from baton_pb.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from common.errors import BatonError, WorkerLostError

_CHANNELS = 4
_TAIL_BYTES = 1024
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
PROMPT_IDS = list(range(100, 132))
PROMPT_TEXT = "The quick brown fox jumps over the lazy dog."


@dataclass(slots=True)
class Samples:
    """What the streams of one run saw. Owned by the run."""

    ttft_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    wall_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests that ended, for each second."""
        return len(self.ttft_s) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens that arrived, for each second."""
        return self.num_tokens / self.wall_s

    def ttft_ms(self, percentile: float) -> float:
        """Return a percentile of the time to the first token."""
        return float(np.percentile(self.ttft_s, percentile)) * 1000


class Face(Protocol):
    """One way to ask."""

    async def ask(self, slot: int, max_tokens: int, samples: Samples) -> None:
        """Send a request and read its answer to the end.

        Args:
            slot: which of the concurrent streams asks.
            max_tokens: length of the answer.
            samples: where what was seen goes.
        """
        ...

    async def begin(self, slot: int, max_tokens: int) -> None:
        """Send a request and read its first token, no more."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class GrpcFace:
    """Baton's own API."""

    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(_CHANNELS)]
        self._held: list[Any] = []
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]

    def _call(self, slot: int, max_tokens: int) -> Any:
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        message = inference_pb2.GenerateRequest(sampling=sampling, token_ids=inference_pb2.TokenIds(ids=PROMPT_IDS))
        return self._stubs[slot % _CHANNELS].Generate(message)

    async def ask(self, slot: int, max_tokens: int, samples: Samples) -> None:
        """See Face."""
        begin, first, count = time.monotonic(), 0.0, 0
        async for response in self._call(slot, max_tokens):
            if not count and response.token_ids:
                first = time.monotonic()
            count += len(response.token_ids)
        samples.ttft_s.append(first - begin)
        samples.num_tokens += count

    async def begin(self, slot: int, max_tokens: int) -> None:
        """See Face."""
        call = self._call(slot, max_tokens)
        self._held.append(call)
        await call.read()

    async def close(self) -> None:
        """See Face."""
        for channel in self._channels:
            await channel.close(None)


class SseFace:
    """OpenAI's API, with a connection kept open for each concurrent stream."""

    def __init__(self, address: str, model: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._model = host, int(port), model
        self._connections: dict[int, _SseConnection] = {}

    async def ask(self, slot: int, max_tokens: int, samples: Samples) -> None:
        """See Face."""
        connection = await self._connection(slot)
        begin = time.monotonic()
        await connection.ask(self._body(max_tokens))
        samples.ttft_s.append(connection.first_s - begin)
        samples.num_tokens += connection.num_tokens

    async def begin(self, slot: int, max_tokens: int) -> None:
        """See Face."""
        connection = await self._connection(slot)
        await connection.ask(self._body(max_tokens), to_the_end=False)

    async def _connection(self, slot: int) -> "_SseConnection":
        if slot not in self._connections:
            loop = asyncio.get_running_loop()
            _, self._connections[slot] = await loop.create_connection(_SseConnection, self._host, self._port)
        return self._connections[slot]

    def _body(self, max_tokens: int) -> bytes:
        asked = {
            "model": self._model,
            "prompt": PROMPT_TEXT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(asked).encode()

    async def close(self) -> None:
        """See Face."""
        for connection in self._connections.values():
            connection.transport.abort()


class _SseConnection(asyncio.Protocol):
    """Reads no more of an answer than is measured: when it begins, when it ends, and how many tokens it had."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.transport: Any = None
        self._tail = b""
        self._to_the_end = True
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and with it the answer under way."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(WorkerLostError(f"the connection broke: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Look for the first event and for the end."""
        tail = (self._tail + data)[-max(_TAIL_BYTES, len(data)) :]
        if not self.first_s and b"data: {" in tail:
            self.first_s = time.monotonic()
            if not self._to_the_end:
                self._end()
        self._tail = tail
        if tail.endswith(b"0\r\n\r\n") or (not self.first_s and not tail.startswith(b"HTTP/1.1 200")):
            self._end()

    def _end(self) -> None:
        assert self._ended is not None
        if self._ended.done():
            return
        if self.first_s:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(BatonError(f"no answer: {self._tail[:300]!r}"))

    async def ask(self, body: bytes, to_the_end: bool = True) -> None:
        """Send a request and wait for its answer's end, or for its beginning only."""
        self._to_the_end = to_the_end
        self.first_s, self._tail = 0.0, b""
        self._ended = asyncio.get_running_loop().create_future()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        await self._ended

    @property
    def num_tokens(self) -> int:
        """Of the last answer, as its usage says."""
        found = _USAGE.findall(self._tail)
        return int(found[-1]) if found else 0


async def run(face: Face, streams: int, max_tokens: int, seconds: float, spread_s: float = 0.0) -> Samples:
    """Keep so many streams busy for so long; those under way at the end are read to their end.

    Args:
        face: how to ask.
        streams: how many at once.
        max_tokens: length of each answer.
        seconds: how long to go on asking.
        spread_s: the first requests are spread over so long, so that they do not go in step for ever.
    """
    warm = Samples()
    await asyncio.gather(*(face.ask(slot, min(max_tokens, 4), warm) for slot in range(streams)))
    samples = Samples()
    begin = time.monotonic()

    async def keep_asking(slot: int) -> None:
        await asyncio.sleep(spread_s * slot / streams)
        while time.monotonic() < begin + seconds:
            await face.ask(slot, max_tokens, samples)

    await asyncio.gather(*(keep_asking(slot) for slot in range(streams)))
    samples.wall_s = time.monotonic() - begin
    return samples
