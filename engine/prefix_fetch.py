"""Blocks from another worker: whoever holds them is asked to push them."""

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.errors import WorkerLostError
from common.status import error_from_rpc
from engine.peer_channels import PeerChannels
from engine.worker_times import FETCH_MAX_S
from kvtransfer.interface import Endpoint


class PrefixFetcher:
    """Fetches blocks into room that the caller has. Owned by the worker's asyncio loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channels = PeerChannels()

    async def fetch(
        self, holder: worker_pb2.PrefixHolder, first_block: int, hashes: list[bytes], blocks: list[int]
    ) -> None:
        """Have blocks filled by their holder. Returns or raises only when nothing can arrive any more.

        Args:
            holder: whom to ask.
            first_block: place of the first block in its prompt.
            hashes: what is wanted.
            blocks: where to, one for each hash.

        Raises:
            BatonError: not all came; the blocks hold anything.
        """
        landing = self._endpoint.grant(blocks, first_block)
        try:
            await self._ask(
                holder, worker_pb2.FetchRequest(hashes=hashes, ticket=landing.ticket, timeout_s=FETCH_MAX_S)
            )
            await landing.landed()
        finally:
            await landing.abort("the fetch was given up")  # nothing, after it has landed

    async def close(self) -> None:
        """Close the channels. No fetch runs any more."""
        await self._channels.close()

    async def _ask(self, holder: worker_pb2.PrefixHolder, request: worker_pb2.FetchRequest) -> None:
        """Let the holder push. Raises its own error."""
        async with self._channels.use(holder.address) as peer:
            try:
                await worker_pb2_grpc.HolderStub(peer.channel).Fetch(request, timeout=FETCH_MAX_S)
            except grpc.RpcError as error:
                typed = error_from_rpc(error)
                peer.is_lost = peer.is_lost or isinstance(typed, WorkerLostError)
                raise typed from error
