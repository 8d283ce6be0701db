"""How many requests run here, and how they ended. The bound on running requests."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import BatonError, OverloadedError
from common.logs import log
from common.status import codes_of

_LOG = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0


class Counts:
    """Owned by the gateway's loop; plain functions."""

    def __init__(self, running_max: int) -> None:
        self.running = 0
        self.queued = 0
        """Of those running: not placed yet."""
        self.requests_total = 0
        self.errors: Counter[str] = Counter()
        """Requests that ended with an error, by gRPC code."""
        self.counters: Counter[str] = Counter()
        self.transports: set[str] = set()
        """Seen in finished requests."""
        self._running_max = running_max
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request from its arrival to its end.

        Raises:
            OverloadedError: running_max requests run already.
        """
        self.requests_total += 1
        try:
            if self.running >= self._running_max:
                raise OverloadedError(f"{self.running} requests run here, the most that may", _RETRY_AFTER_S)
            self.running += 1
            self._idle.clear()
            try:
                yield
            finally:
                self.running -= 1
                if not self.running:
                    self._idle.set()
        except BatonError as error:
            self.errors[codes_of(error).grpc.name] += 1
            raise
        except GeneratorExit:
            self.counters["abandoned_total"] += 1
            raise

    async def idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Count one request that waits for its placement."""
        self.queued += 1
        try:
            yield
        finally:
            self.queued -= 1

    def retried(self, request_id: str, workers: frozenset[str], error: BatonError) -> None:
        """Count a request that is placed anew because a worker failed it."""
        self.counters["retries_total"] += 1
        log(_LOG, logging.WARNING, f"trying elsewhere: {error.message}", request_id=request_id, without=sorted(workers))
