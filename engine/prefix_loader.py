"""Bringing a prefix into the pool before its sequence is computed: from the tiers below, or from another worker."""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from baton_pb.v1 import worker_pb2
from common.errors import BatonError, OverloadedError
from common.logs import log
from engine.engine import Engine
from engine.prefix_fetch import PrefixFetcher
from engine.sequence import Sequence
from kvtransfer.interface import Endpoint

_logger = logging.getLogger(__name__)

SHARE_MAX = 2
"""What is brought takes at most one of so many available blocks: it must not push running sequences out of the pool."""

Fill = Callable[[int, list[bytes], list[int]], Awaitable[int]]
"""Writes prefixes into blocks, given how many blocks come before them; returns how many of the first ones came."""


class PrefixLoader:
    """Brings blocks into the prefix cache, where a sequence then finds them.

    Owned by the worker's asyncio loop. Never fails a request: what cannot be had is computed.
    """

    def __init__(self, engine: Engine, endpoint: Endpoint, worker_id: str) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._fetcher = PrefixFetcher(endpoint)
        self._counters: Counter[str] = Counter()
        self._fetches = worker_pb2.FetchTotals()

    @property
    def counters(self) -> Counter[str]:
        """Of the worker's report."""
        tiers, fetches = self._engine.tiers, self._fetches
        fetched = Counter(prefix_fetches_total=fetches.fetches, fetched_tokens_total=fetches.tokens)
        return self._counters + fetched + (Counter() if tiers is None else tiers.counters)

    @property
    def fetches(self) -> worker_pb2.FetchTotals:
        """What other workers have pushed, and how long that took: from this the router learns what a fetch costs."""
        totals = worker_pb2.FetchTotals()
        totals.CopyFrom(self._fetches)
        return totals

    def is_worthwhile(self, sequence: Sequence, holder: worker_pb2.PrefixHolder | None) -> bool:
        """Return whether `load` could bring anything."""
        return self._num_below(sequence) > 0 or (holder is not None and self._has_more(sequence, holder))

    async def load(self, sequence: Sequence, holder: worker_pb2.PrefixHolder | None) -> None:
        """Bring what can be had. Returns when nothing can arrive any more."""
        if self._num_below(sequence) > 0:
            await self._restore(sequence)
        if holder is not None and self._has_more(sequence, holder):
            await self._fetch(sequence, holder)

    async def close(self) -> None:
        """Nothing is loaded any more."""
        await self._fetcher.close()

    def _num_below(self, sequence: Sequence) -> int:
        """Return how many blocks the tiers could add to what the pool has."""
        engine = self._engine
        if engine.tiers is None:
            return 0
        hashes = self._hashes(sequence)
        return engine.tiers.peek(hashes[engine.pool.peek(hashes) :], engine.block_s)

    def _has_more(self, sequence: Sequence, holder: worker_pb2.PrefixHolder) -> bool:
        """Return whether the holder has blocks that this pool lacks."""
        hashes = self._hashes(sequence)[: holder.num_blocks]
        return holder.worker_id != self._worker_id and self._engine.pool.peek(hashes) < len(hashes)

    async def _restore(self, sequence: Sequence) -> None:
        tiers = self._engine.tiers
        assert tiers is not None
        hashes = self._hashes(sequence)
        hashes = hashes[: self._engine.pool.peek(hashes) + self._num_below(sequence)]

        async def fill(num_before: int, missing: list[bytes], blocks: list[int]) -> int:  # noqa: ARG001
            return await tiers.restore(missing, blocks)

        await self._bring(hashes, fill, is_any_good=True)

    async def _fetch(self, sequence: Sequence, holder: worker_pb2.PrefixHolder) -> None:
        async def fill(num_before: int, missing: list[bytes], blocks: list[int]) -> int:
            with self._counted(len(missing)):
                await self._fetcher.fetch(holder, num_before, missing, blocks)
            return len(blocks)

        try:
            await self._bring(self._hashes(sequence)[: holder.num_blocks], fill, is_any_good=False)
        except BatonError as error:
            self._counters["prefix_fetches_failed_total"] += 1
            fields = {"request_id": sequence.request_id, "worker_id": self._worker_id, "holder": holder.worker_id}
            log(_logger, logging.INFO, "prefix not fetched", error=error, **fields)

    @contextmanager
    def _counted(self, num_blocks: int) -> Iterator[None]:
        """Count a fetch of so many blocks, however it ends: one that is given up was slow as well."""
        fetches, num_tokens, start = self._fetches, num_blocks * self._engine.layout.block_tokens, time.perf_counter()
        try:
            yield
        except BaseException:
            fetches.failed_tokens += num_tokens
            fetches.failed_seconds += time.perf_counter() - start
            raise
        fetches.fetches += 1
        fetches.tokens += num_tokens
        fetches.seconds += time.perf_counter() - start

    async def _bring(self, hashes: list[bytes], fill: Fill, is_any_good: bool) -> int:
        """Fill blocks with what the pool lacks of a prefix; return how many came. They stay, kept under their hashes.

        Args:
            hashes: the prefix.
            fill: writes what is missing.
            is_any_good: whether less than all of it is worth bringing.

        Raises:
            OverloadedError: there is no room for all, and less is no good.
            BatonError: that of `fill`.
        """
        pool = self._engine.pool
        held = pool.match(hashes)  # so that what comes continues what is here
        missing, blocks = hashes[len(held) :], list[int]()
        room = pool.num_available // SHARE_MAX
        try:
            if len(missing) > room and not is_any_good:
                raise OverloadedError(f"{len(missing)} blocks are too many for {pool.num_available} available ones")
            missing = missing[:room]
            blocks = pool.allocate(len(missing))
            count = await fill(len(held), missing, blocks)
            for block_id, block_hash in zip(blocks[:count], missing, strict=False):
                pool.seal(block_id, block_hash)
        finally:
            pool.release([*held, *blocks])
        return count

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        return sequence.reusable_hashes(self._engine.layout.block_tokens)
