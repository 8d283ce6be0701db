"""Calls to prefill workers: one channel for each address, kept while it works."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.errors import BatonError
from common.rpc import open_channel
from common.status import error_from_rpc

CHANNELS_MAX = 256
"""Idle channels beyond which the longest unused one is closed."""


@dataclass(slots=True, eq=False)
class _Line:
    """A channel and how many calls use it."""

    channel: grpc.aio.Channel
    num_calls: int = 0
    is_dropped: bool = False


class PrefillCall:
    """One call under way. Raises our own errors, with the prefill worker's code and words."""

    def __init__(self, call: Any) -> None:
        self._call = (
            call  # Any: grpc.aio.UnaryStreamCall, which the stubs make generic in ways that its users cannot name
        )

    async def first_token(self) -> worker_pb2.FirstToken:
        """Wait for the first token.

        Raises:
            BatonError: the prefill worker's error, WorkerLostError if it is gone.
        """
        update = await self._read()
        if update is None or not update.HasField("first_token"):
            raise BatonError("the prefill worker sent no first token")
        return update.first_token

    async def pushed(self) -> None:
        """Wait for the end of the call.

        Raises:
            BatonError: as above.
        """
        while await self._read() is not None:
            pass

    async def _read(self) -> worker_pb2.PrefillUpdate | None:
        try:
            update = await self._call.read()
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return update if isinstance(update, worker_pb2.PrefillUpdate) else None  # None: the end


class PrefillCalls:
    """Channels by address. A channel whose worker was lost is dropped: the next call connects anew."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    @asynccontextmanager
    async def open(
        self, address: str, request: worker_pb2.PrefillRequest, timeout_s: float | None
    ) -> AsyncIterator[PrefillCall]:
        """Call `Prefill` at `address`; leaving the context before its end cancels the call."""
        line = self._take(address)
        line.num_calls += 1
        call = worker_pb2_grpc.PrefillStub(line.channel).Prefill(request, timeout=timeout_s)
        try:
            yield PrefillCall(call)
        finally:
            is_lost = call.done() and await call.code() == grpc.StatusCode.UNAVAILABLE
            call.cancel()
            line.num_calls -= 1
            if is_lost and not line.is_dropped:
                self._drop(address)
            if line.is_dropped and not line.num_calls:
                await line.channel.close(None)

    async def close(self) -> None:
        """Close all channels; their calls are cancelled."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.is_dropped = True
            await line.channel.close(None)

    def _take(self, address: str) -> _Line:
        line = self._lines.pop(address, None)
        if line is None:
            line = _Line(open_channel(address))
            idle = [other for other, used in self._lines.items() if not used.num_calls]
            if len(self._lines) >= CHANNELS_MAX and idle:
                self._drop(idle[0])
        self._lines[address] = line  # last: the most recently used
        return line

    def _drop(self, address: str) -> None:
        self._lines.pop(address).is_dropped = True
