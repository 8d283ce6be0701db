"""Bringing a prefix into the pool before its sequence is computed: from the tiers below, or from another worker."""

from collections import Counter

from baton_pb.v1 import worker_pb2
from engine.engine import Engine
from engine.prefix_fetch import SHARE_MAX, PrefixFetcher
from engine.sequence import Sequence
from kvtransfer.interface import Endpoint


class PrefixLoader:
    """Owned by the worker's asyncio loop. Never fails a request: what cannot be had is computed."""

    def __init__(self, engine: Engine, endpoint: Endpoint, worker_id: str) -> None:
        self._engine = engine
        self._fetcher = PrefixFetcher(engine, endpoint, worker_id)

    @property
    def counters(self) -> Counter[str]:
        """Of the worker's report."""
        tiers = self._engine.tiers
        return self._fetcher.counters + (Counter() if tiers is None else tiers.counters)

    def is_worthwhile(self, sequence: Sequence, holder: worker_pb2.PrefixHolder | None) -> bool:
        """Return whether `load` could bring anything."""
        return self._num_below(sequence) > 0 or (holder is not None and self._fetcher.is_worthwhile(sequence, holder))

    async def load(self, sequence: Sequence, holder: worker_pb2.PrefixHolder | None) -> None:
        """Bring what can be had; the sequence then finds it in the prefix cache. Returns when nothing can arrive."""
        if self._num_below(sequence) > 0:
            await self._restore(sequence)
        if holder is not None and self._fetcher.is_worthwhile(sequence, holder):
            await self._fetcher.fetch(sequence, holder)

    async def close(self) -> None:
        """Nothing is loaded any more."""
        await self._fetcher.close()

    def _num_below(self, sequence: Sequence) -> int:
        """Return how many blocks the tiers could add to what the pool has."""
        engine = self._engine
        if engine.tiers is None:
            return 0
        hashes = sequence.reusable_hashes(engine.layout.block_tokens)
        return engine.tiers.peek(hashes[engine.pool.peek(hashes) :], engine.block_s)

    async def _restore(self, sequence: Sequence) -> None:
        engine, pool = self._engine, self._engine.pool
        assert engine.tiers is not None
        hashes = sequence.reusable_hashes(engine.layout.block_tokens)
        held = pool.match(hashes)
        missing = hashes[len(held) :]
        missing = missing[: engine.tiers.peek(missing, engine.block_s)]
        missing = missing[: pool.num_available // SHARE_MAX]
        blocks = pool.allocate(len(missing))
        try:
            count = await engine.tiers.restore(missing, blocks)
            for block_id, block_hash in zip(blocks[:count], missing, strict=False):
                pool.seal(block_id, block_hash)
        finally:
            pool.release([*held, *blocks])
