"""Calls to prefill workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.errors import BatonError
from common.status import error_from_rpc
from engine.peer_channels import PeerChannels


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
    """Calls to prefill workers."""

    def __init__(self) -> None:
        self._channels = PeerChannels()

    @asynccontextmanager
    async def open(
        self, address: str, request: worker_pb2.PrefillRequest, timeout_s: float | None
    ) -> AsyncIterator[PrefillCall]:
        """Call `Prefill` at `address`; leaving the context before its end cancels the call."""
        async with self._channels.use(address) as peer:
            call = worker_pb2_grpc.PrefillStub(peer.channel).Prefill(request, timeout=timeout_s)
            try:
                yield PrefillCall(call)
            finally:
                peer.is_lost = peer.is_lost or (call.done() and await call.code() == grpc.StatusCode.UNAVAILABLE)
                call.cancel()

    async def close(self) -> None:
        """Close all channels; their calls are cancelled."""
        await self._channels.close()
