"""What simulated workers of all roles have in common: real books, a count of their work, one link."""

import math
from collections.abc import Sequence

from cluster.router.fetch_model import FetchTotals
from common.errors import OverloadedError
from engine.bookkeeping import Bookkeeping
from loadtest.simulator.job import Job
from loadtest.simulator.profile import Profile
from loadtest.simulator.sequence import SimulatedSequence
from loadtest.simulator.step_count import StepCount


class Link:
    """One worker's network: transfers go one after the other."""

    def __init__(self) -> None:
        self.free_at = 0.0


def transfer(
    sender: Link, receiver: Link, num_bytes: float, profile: Profile, now: float, until: float = math.inf
) -> float:
    """Occupy both links, at most `until`; return when the last byte is there, or would be."""
    start = max(now, sender.free_at, receiver.free_at)
    end = start + num_bytes / profile.link.bytes_per_s
    sender.free_at = receiver.free_at = end if end <= until else max(start, until)
    return end


class SimulatedWorker:
    """Blocks and their names are the real ones' (engine/); only time is made up. Owned by one simulation."""

    def __init__(self, worker_id: str, profile: Profile) -> None:
        self.worker_id = worker_id
        self.books = Bookkeeping(profile.pool_blocks, profile.block_tokens, profile.context_tokens)
        self.done = StepCount()
        self.fetches = FetchTotals()
        self.link = Link()
        self.reported_at = -math.inf
        """When it last told its load, or will: before that it need not be asked again."""
        self._profile = profile

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute here."""
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """Bring the books up to the moment."""

    def num_missing(self, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, the prefix that is here left out, are not here."""
        return len(names) - self.books.pool.peek(names)

    def receive(self, names: Sequence[bytes]) -> None:
        """Keep these blocks, which another worker has pushed, if there is room."""
        pool = self.books.pool
        blocks = pool.match(names)
        try:
            fresh = pool.allocate(len(names) - len(blocks))
        except OverloadedError:
            fresh = []
        pool.seal_all(fresh, names[len(blocks) : len(blocks) + len(fresh)])
        pool.release(blocks + fresh)

    def fetched(self, num_tokens: int, seconds: float) -> None:
        """Count a prefix that another worker has pushed."""
        before = self.fetches
        self.fetches = before._replace(
            fetches=before.fetches + 1, tokens=before.tokens + num_tokens, seconds=before.seconds + seconds
        )

    def gave_up(self, num_tokens: int, seconds: float) -> None:
        """Count a prefix that another worker has not pushed in time."""
        before = self.fetches
        self.fetches = before._replace(
            failed_tokens=before.failed_tokens + num_tokens, failed_seconds=before.failed_seconds + seconds
        )

    def check_idle(self) -> None:
        """Assert that no request is here and no block is held."""
        self.books.pool.check()
        assert self.books.pool.num_used == 0
        assert (self.queued_tokens, self.num_waiting, self.num_running) == (0, 0, 0)

    def _sequence(self, job: Job) -> SimulatedSequence:
        return SimulatedSequence(job.names, job.num_prompt, job.num_prompt, self.books.block_tokens)

    def _check_queue(self, num_waiting: int) -> None:
        if num_waiting >= self._profile.waiting_max:
            raise OverloadedError(f"{num_waiting} requests wait on {self.worker_id}")
