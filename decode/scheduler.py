"""Which sequences hold blocks, and what the next step computes. Pure: no clock, no I/O."""

import bisect
import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from common.errors import InvalidRequestError, OverloadedError
from decode.chunk_budget import ChunkBudget
from engine.bookkeeping import BookedSequence, Bookkeeping


class Phase(enum.Enum):
    """Where a stream stands; see DecodeScheduler."""

    WAITING = "waiting"
    LANDING = "landing"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False, kw_only=True)
class Stream:
    """A sequence on its way through the scheduler, which alone changes these fields but for `is_loading`."""

    sequence: BookedSequence
    is_remote: bool = False
    """Another worker prefills it; else this one does, be it from the start or after a preemption."""
    is_loading: bool = False
    """Whether blocks of its prefix are on their way into the pool: it is admitted after that."""
    number: int = 0
    """Counts arrivals: the order of admission."""
    arrived_at: int = 0
    """Prompt tokens that had been scheduled here before it arrived."""
    phase: Phase = Phase.WAITING
    first_block: int = 0
    """Leading blocks that were here already when it was admitted: they are not sent."""
    num_preemptions: int = 0
    below: Seq[bytes] = ()
    """After a preemption: hashes of its next blocks that come back from the tiers below the pool."""
    cached_tokens: int | None = None
    """What prefill reused; None before the prompt was looked up."""


S = TypeVar("S", bound=Stream)


class PlannedChunk(NamedTuple, Generic[S]):
    """The next `num_tokens` of a stream; one for a decode."""

    stream: S
    num_tokens: int


class StepPlan(NamedTuple, Generic[S]):
    """A step, and which streams lost their blocks so that the others could go on."""

    decodes: list[S]
    """Those that get their next token."""
    prompts: list[PlannedChunk[S]]
    preempted: list[S]

    @property
    def chunks(self) -> list[PlannedChunk[S]]:
        """All that is computed: a token of each that decodes, then the prompts'."""
        return [*(PlannedChunk(stream, 1) for stream in self.decodes), *self.prompts]


class DecodeScheduler(Generic[S]):
    """Admission in order of arrival, continuous batching, preemption of the youngest.

              admit, KV from elsewhere ──► LANDING ──join──► RUNNING
        add ──► WAITING ──admit, prefill here─────────────────►│ │
                   ▲─────── preempt: blocks lost, tokens kept ──┘ └─remove──► gone

    WAITING holds no blocks; LANDING and RUNNING hold blocks for all their tokens and the next one. A preempted
    stream keeps its place in the order of arrival: it is older than all that wait, so it comes back first, and the
    oldest stream is never preempted for another. So everyone ends, as long as those that hold blocks end.
    Blocks that a preempted stream computed stay in the prefix cache until others need them, and then go to the tiers
    below, if there are any. When it is admitted again, what is still in the cache is shared, what a tier gives back
    exactly, and sooner than it is computed, lands from there, and the rest (its last, partial block always) is
    computed.
    Blocks are taken here; the owner gives those of removed streams back. Owned by the decode loop.
    """

    def __init__(
        self, books: Bookkeeping, running_max: int, token_budget: int, itl_target_s: float | None = None
    ) -> None:
        """Make an empty scheduler; the arguments are those of DecodeConfig."""
        self._books = books
        self._chunk_budget = None if itl_target_s is None else ChunkBudget(itl_target_s)
        self._num_scheduled_tokens = 0
        # So each admitted stream has a token in every step, whether it decodes or still prefills.
        self._seats = min(running_max, token_budget)
        self._token_budget = token_budget
        self._num_arrived = 0
        self.waiting: list[S] = []
        self.landing: list[S] = []
        self.running: list[S] = []

    def check_fits(self, num_tokens: int, max_tokens: int | None) -> None:
        """Refuse what could never be finished in this pool, even alone.

        Args:
            num_tokens: of the prompt.
            max_tokens: of the output. None, or all that the context window leaves, is no wish of its own: such a
                sequence ends when it fills the pool, at the latest.

        Raises:
            InvalidRequestError: naming need and limit.
        """
        if max_tokens is None or num_tokens + max_tokens >= self._books.context_tokens:
            return
        need, limit = self._books.blocks_for(num_tokens + max_tokens), self._books.pool.num_blocks
        if need > limit:
            raise InvalidRequestError(
                f"{num_tokens} prompt tokens and max_tokens {max_tokens} need {need} blocks, the pool has {limit}"
            )

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of one stream: the whole pool."""
        return self._books.pool.num_blocks * self._books.block_tokens

    def add(self, stream: S) -> None:
        """Queue a stream."""
        self._num_arrived += 1
        stream.number = self._num_arrived
        stream.arrived_at = self._num_scheduled_tokens
        stream.phase = Phase.WAITING
        self.waiting.append(stream)

    def remove(self, stream: S) -> None:
        """Forget a stream. Its blocks stay with it."""
        self._list_of(stream).remove(stream)
        stream.phase = Phase.ENDED

    def admit(self) -> list[S]:
        """Give blocks to waiting streams, in order, while there is room; return those whose KV is elsewhere.

        Those are LANDING now, from a prefill worker or (`below`) from a tier; the others RUNNING. May be called while
        a step runs.
        """
        landing: list[S] = []
        if not self.waiting:  # mostly: and between any two steps it is asked
            return landing
        for stream in [stream for stream in self.waiting if not stream.is_loading]:
            if len(self.landing) + len(self.running) >= self._seats or not self._reserve(stream):
                break
            self.waiting.remove(stream)
            if stream.is_remote or stream.below:
                stream.phase = Phase.LANDING
                self.landing.append(stream)
                landing.append(stream)
            else:
                self._run(stream)
        return landing

    def join(self, stream: S) -> None:
        """Let a landed stream decode from the next step on."""
        self.landing.remove(stream)
        self._run(stream)

    def plan(self) -> StepPlan[S]:
        """Return the next step: one token of every decoding stream, then prompt chunks, shortest remaining first.

        At most `token_budget` tokens; beside decodes no more of a prompt than the chunk budget has. A prompt ages
        as in prefill/scheduler.py: it is overtaken only until as many tokens as it has left have been computed.
        Not to be called while a step runs: it may preempt.
        """
        decodes: list[S] = []
        preempted: list[S] = []
        prompts: list[S] = []
        block_tokens = self._books.block_tokens
        for stream in list(self.running):
            sequence = stream.sequence
            if stream.phase is not Phase.RUNNING or not sequence.is_ready:
                continue
            if sequence.num_uncomputed > 1:
                prompts.append(stream)
            elif sequence.num_tokens <= len(sequence.block_table) * block_tokens or self._grow(stream, preempted):
                decodes.append(stream)
        return StepPlan(decodes, self._prompt_chunks(prompts, len(decodes)) if prompts else [], preempted)

    def ran(self, chunks: Seq[PlannedChunk[S]], seconds: float) -> None:
        """Note how long a step with these chunks took."""
        if self._chunk_budget is not None:
            sizes = [num_tokens for _, num_tokens in chunks]
            self._chunk_budget.observe(sizes.count(1), sum(size for size in sizes if size > 1), seconds)

    def _prompt_chunks(self, prompts: list[S], num_decoding: int) -> list[PlannedChunk[S]]:
        budget = self._token_budget - num_decoding
        if num_decoding and self._chunk_budget is not None:
            budget = min(budget, self._chunk_budget.tokens())
        chunks = []
        for stream in sorted(prompts, key=_rank):
            num_tokens = min(budget, stream.sequence.num_uncomputed)
            if num_tokens <= 0:
                break
            chunks.append(PlannedChunk(stream, num_tokens))
            budget -= num_tokens
            self._num_scheduled_tokens += num_tokens
        return chunks

    def _reserve(self, stream: S) -> bool:
        """Take the cached prefix and blocks for the rest, and one token more, so that its first decode needs none."""
        books, sequence = self._books, stream.sequence
        block_tokens = books.block_tokens
        # A landing needs no logits of its own, so even a prompt's last full block may come from the cache.
        hashes = sequence.reusable_hashes(block_tokens) if not stream.is_remote else sequence.hashes
        matched = books.pool.match(hashes)
        need = books.blocks_for(sequence.num_tokens + 1) - len(matched)
        # A block for each running stream stays free, or the newcomer would soon be preempted for one of them.
        if need + len(self.running) > books.pool.num_available:
            books.pool.release(matched)
            return False
        sequence.block_table = matched + books.pool.allocate(need)
        if not stream.is_remote:
            sequence.num_computed = len(matched) * block_tokens
        stream.first_block = len(matched)
        if stream.num_preemptions:
            below = hashes[len(matched) :]
            stream.below = below[: books.num_below(below)]
        if stream.cached_tokens is None:
            sequence.num_cached = min(len(matched) * block_tokens, sequence.num_prompt_tokens)
            stream.cached_tokens = sequence.num_cached
        return True

    def _grow(self, stream: S, preempted: list[S]) -> bool:
        """Give a stream a block for its last token, if need be a younger stream's; False: it lost its own."""
        sequence = stream.sequence
        while len(sequence.block_table) < self._books.blocks_for(sequence.num_tokens):
            try:
                sequence.block_table += self._books.pool.allocate(1)
            except OverloadedError:
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is stream:
                    return False
        return True

    def _preempt(self, stream: S) -> None:
        sequence = stream.sequence
        self.running.remove(stream)
        self._books.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        stream.is_remote = False
        stream.num_preemptions += 1
        stream.phase = Phase.WAITING
        bisect.insort(self.waiting, stream, key=_number)

    def _run(self, stream: S) -> None:
        stream.phase = Phase.RUNNING
        bisect.insort(self.running, stream, key=_number)

    def _list_of(self, stream: S) -> list[S]:
        match stream.phase:
            case Phase.WAITING:
                return self.waiting
            case Phase.LANDING:
                return self.landing
            case Phase.RUNNING:
                return self.running
            case Phase.ENDED:
                raise AssertionError("the stream has ended")


def _rank(stream: Stream) -> tuple[int, int]:
    return stream.sequence.num_uncomputed + stream.arrived_at, stream.number


def _number(stream: Stream) -> int:
    return stream.number
