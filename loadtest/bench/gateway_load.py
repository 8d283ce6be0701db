"""The client of `make bench-gateway`: streams over gRPC or server-sent events, each read to its end.

Two ways to load: `run` keeps so many streams busy, each asks again when its answer has ended (a closed loop: it
finds the most that can be had); `run_paced` sends requests when they are due, whatever becomes of the others (an open
loop: it finds how long a request takes at a given load). In a closed loop requests come when tokens do, and wait behind
them.
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import numpy as np

from baton_pb.v1 import common_pb2, inference_pb2
from common.errors import BatonError, WorkerLostError
from loadtest.bench.gateway_h2 import H2Call, H2Connection

_CONNECTIONS = 4
"""Of the gRPC client, for all its streams."""
_GENERATE = "/baton.v1.Inference/Generate"
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
    num_early: int = 0
    """Requests that only warmed up: their times are not among these, but they cost the server as much."""

    @property
    def requests_per_s(self) -> float:
        """Requests that ended, for each second."""
        return len(self.ttft_s) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens that arrived, for each second."""
        return self.num_tokens / self.wall_s

    def with_more(self, other: "Samples") -> "Samples":
        """Return both together."""
        return Samples(
            self.ttft_s + other.ttft_s,
            self.num_tokens + other.num_tokens,
            self.wall_s + other.wall_s,
            self.num_early + other.num_early,
        )

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
        self._address = address
        self._connections: list[H2Connection] = []
        self._opening: asyncio.Task[list[H2Connection]] | None = None

    async def ask(self, slot: int, max_tokens: int, samples: Samples) -> None:
        """See Face."""
        connection = await self._connection(slot)
        message = _message(max_tokens)
        begin = time.monotonic()
        call = connection.call(message)
        await call.ended
        samples.ttft_s.append(call.first_s - begin)
        samples.num_tokens += call.num_tokens()

    async def begin(self, slot: int, max_tokens: int) -> None:
        """See Face."""
        call: H2Call = (await self._connection(slot)).call(_message(max_tokens))
        await call.has_begun

    async def _connection(self, slot: int) -> H2Connection:
        if not self._connections:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
            self._connections = await self._opening
        return self._connections[slot % _CONNECTIONS]

    async def _open(self) -> list[H2Connection]:
        return [await H2Connection.open(self._address, _GENERATE) for _ in range(_CONNECTIONS)]

    async def close(self) -> None:
        """See Face."""
        for connection in self._connections:
            connection.close()


def _message(max_tokens: int) -> bytes:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    asked = inference_pb2.GenerateRequest(sampling=sampling, token_ids=inference_pb2.TokenIds(ids=PROMPT_IDS))
    return asked.SerializeToString()


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


async def run(face: Face, streams: int, max_tokens: int, seconds: float) -> Samples:
    """Keep so many streams busy for so long; those under way at the end are read to their end.

    Args:
        face: how to ask.
        streams: how many at once.
        max_tokens: length of each answer.
        seconds: how long to go on asking.
    """
    samples = Samples()
    begin = time.monotonic()

    async def keep_asking(slot: int) -> None:
        while time.monotonic() < begin + seconds:
            await face.ask(slot, max_tokens, samples)

    await asyncio.gather(*(keep_asking(slot) for slot in range(streams)))
    samples.wall_s = time.monotonic() - begin
    return samples


async def run_paced(face: Face, arrivals: Sequence[float], max_tokens: int, warm_s: float, slots: int) -> Samples:
    """Send a request whenever one is due, and read each to its end.

    Args:
        face: how to ask.
        arrivals: when, in seconds from now on, in order.
        max_tokens: length of each answer.
        warm_s: requests before then are sent and not counted: the streams that are meant to run are not there yet.
        slots: connections that are open already; more are opened if so many requests run.
    """
    samples, early = Samples(), Samples()
    free, loop = list(range(slots)), asyncio.get_running_loop()
    begin = loop.time()

    async def ask(slot: int, due_s: float) -> None:
        await face.ask(slot, max_tokens, samples if due_s >= warm_s else early)
        free.append(slot)

    async with asyncio.TaskGroup() as group:
        for due_s in arrivals:
            await asyncio.sleep(begin + due_s - loop.time())
            if not free:
                free.append(slots)
                slots += 1
            group.create_task(ask(free.pop(), due_s))
    samples.wall_s = arrivals[-1] - warm_s
    samples.num_early = len(early.ttft_s)
    return samples


def poisson(rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Return arrival times, in seconds, of requests that know nothing of each other; the same for the same seed."""
    random, times, now_s = Random(seed), list[float](), 0.0
    while (now_s := now_s + random.expovariate(rate_per_s)) < seconds:
        times.append(now_s)
    return times


async def warm_up(face: Face, streams: int, max_tokens: int) -> None:
    """Open all connections, and go each way once."""
    warm = Samples()
    await asyncio.gather(*(face.ask(slot, min(max_tokens, 4), warm) for slot in range(streams)))
