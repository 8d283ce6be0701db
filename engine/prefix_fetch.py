"""A prefix from another worker: its blocks come into the own pool's prefix cache, where a sequence then finds them."""

import logging
from collections import Counter

import grpc

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.errors import BatonError, OverloadedError, WorkerLostError
from common.logs import log
from common.status import error_from_rpc
from engine.engine import Engine
from engine.peer_channels import PeerChannels
from engine.sequence import Sequence
from kvtransfer.interface import Endpoint, Landing

_logger = logging.getLogger(__name__)

FETCH_S = 5.0
"""Longest time for a fetch: what takes longer is computed sooner."""
SHARE_MAX = 2
"""A fetch takes at most one of so many available blocks: it must not push running sequences out of the pool."""


class PrefixFetcher:
    """Fetches blocks that this pool lacks. Never fails a request: what cannot be had is computed.

    Owned by the worker's asyncio loop.
    """

    def __init__(self, engine: Engine, endpoint: Endpoint, worker_id: str) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._channels = PeerChannels()
        self.counters: Counter[str] = Counter()

    def is_worthwhile(self, sequence: Sequence, holder: worker_pb2.PrefixHolder) -> bool:
        """Return whether the holder has blocks that this pool lacks."""
        hashes = self._hashes(sequence, holder)
        return holder.worker_id != self._worker_id and self._engine.pool.peek(hashes) < len(hashes)

    async def fetch(self, sequence: Sequence, holder: worker_pb2.PrefixHolder) -> None:
        """Bring the holder's blocks here, if that is possible. Returns when nothing can arrive any more."""
        try:
            num_blocks = await self._fetch(self._hashes(sequence, holder), holder)
        except BatonError as error:
            self.counters["prefix_fetches_failed_total"] += 1
            fields = {"request_id": sequence.request_id, "worker_id": self._worker_id, "holder": holder.worker_id}
            log(_logger, logging.INFO, "prefix not fetched", error=error, **fields)
        else:
            self.counters["prefix_fetches_total"] += 1
            self.counters["fetched_tokens_total"] += num_blocks * self._engine.layout.block_tokens

    async def close(self) -> None:
        """Close the channels. No fetch runs any more."""
        await self._channels.close()

    def _hashes(self, sequence: Sequence, holder: worker_pb2.PrefixHolder) -> list[bytes]:
        return sequence.reusable_hashes(self._engine.layout.block_tokens)[: holder.num_blocks]

    async def _fetch(self, hashes: list[bytes], holder: worker_pb2.PrefixHolder) -> int:
        """Return how many blocks came."""
        pool = self._engine.pool
        here = pool.match(hashes)  # held, so that what comes continues what is here
        missing = hashes[len(here) :]
        blocks: list[int] = []
        landing: Landing | None = None
        try:
            if len(missing) > pool.num_available // SHARE_MAX:
                raise OverloadedError(f"{len(missing)} blocks are too many for {pool.num_available} available ones")
            blocks = pool.allocate(len(missing))
            landing = self._endpoint.grant(blocks, len(here))
            await self._ask(holder, worker_pb2.FetchRequest(hashes=missing, ticket=landing.ticket, timeout_s=FETCH_S))
            await landing.landed()
            for block_id, block_hash in zip(blocks, missing, strict=True):
                pool.seal(block_id, block_hash)
        finally:
            if landing is not None:
                await landing.abort("the fetch was given up")  # nothing, after it has landed
            pool.release([*here, *blocks])
        return len(blocks)

    async def _ask(self, holder: worker_pb2.PrefixHolder, request: worker_pb2.FetchRequest) -> None:
        """Let the holder push. Raises its own error."""
        async with self._channels.use(holder.address) as peer:
            try:
                await worker_pb2_grpc.HolderStub(peer.channel).Fetch(request, timeout=FETCH_S)
            except grpc.RpcError as error:
                typed = error_from_rpc(error)
                peer.is_lost = peer.is_lost or isinstance(typed, WorkerLostError)
                raise typed from error
