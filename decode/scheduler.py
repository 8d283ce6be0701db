"""Which sequences hold blocks, and what the next step computes. Pure: no clock, no I/O."""

import bisect
from collections.abc import Sequence as Seq
from typing import NamedTuple

from common.errors import InvalidRequestError, OverloadedError
from decode.chunk_budget import ChunkBudget
from decode.stream import Phase, TokenStream
from engine.engine import Engine


class PlannedChunk(NamedTuple):
    """The next `num_tokens` of a stream; one for a decode."""

    stream: TokenStream
    num_tokens: int


class StepPlan(NamedTuple):
    """A step, and which streams lost their blocks so that the others could go on."""

    chunks: list[PlannedChunk]
    preempted: list[TokenStream]


class DecodeScheduler:
    """Admission in order of arrival, continuous batching, preemption of the youngest.

              admit, KV from elsewhere ──► LANDING ──join──► RUNNING
        add ──► WAITING ──admit, prefill here─────────────────►│ │
                   ▲─────── preempt: blocks lost, tokens kept ──┘ └─remove──► gone

    WAITING holds no blocks; LANDING and RUNNING hold blocks for all their tokens and the next one. A preempted
    stream keeps its place in the order of arrival: it is older than all that wait, so it comes back first, and the
    oldest stream is never preempted for another. So everyone ends, as long as those that hold blocks end.
    Blocks that a preempted stream computed stay in the prefix cache until others need them, and then go to the tiers
    below, if there are any. When it is admitted again, what is still in the cache is shared, what a tier gives back
    sooner than it is computed lands from there, and the rest (its last, partial block always) is computed.
    Blocks are taken here; the owner gives those of removed streams back. Owned by the decode loop.
    """

    def __init__(self, engine: Engine, running_max: int, token_budget: int, itl_target_s: float | None = None) -> None:
        """Make an empty scheduler; the arguments are those of DecodeConfig."""
        self._engine = engine
        self._chunk_budget = None if itl_target_s is None else ChunkBudget(itl_target_s)
        self._num_scheduled_tokens = 0
        # So each admitted stream has a token in every step, whether it decodes or still prefills.
        self._seats = min(running_max, token_budget)
        self._token_budget = token_budget
        self._num_arrived = 0
        self.waiting: list[TokenStream] = []
        self.landing: list[TokenStream] = []
        self.running: list[TokenStream] = []

    def check_fits(self, num_tokens: int, max_tokens: int | None) -> None:
        """Refuse what could never be finished in this pool, even alone.

        Args:
            num_tokens: of the prompt.
            max_tokens: of the output. None, or all that the context window leaves, is no wish of its own: such a
                sequence ends when it fills the pool, at the latest.

        Raises:
            InvalidRequestError: naming need and limit.
        """
        if max_tokens is None or num_tokens + max_tokens >= self._engine.context_tokens:
            return
        need, limit = self._engine.blocks_for(num_tokens + max_tokens), self._engine.pool.num_blocks
        if need > limit:
            raise InvalidRequestError(
                f"{num_tokens} prompt tokens and max_tokens {max_tokens} need {need} blocks, the pool has {limit}"
            )

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of one stream: the whole pool."""
        return self._engine.pool.num_blocks * self._engine.layout.block_tokens

    def add(self, stream: TokenStream) -> None:
        """Queue a stream."""
        self._num_arrived += 1
        stream.number = self._num_arrived
        stream.arrived_at = self._num_scheduled_tokens
        stream.phase = Phase.WAITING
        self.waiting.append(stream)

    def remove(self, stream: TokenStream) -> None:
        """Forget a stream. Its blocks stay with it."""
        self._list_of(stream).remove(stream)
        stream.phase = Phase.ENDED

    def admit(self) -> list[TokenStream]:
        """Give blocks to waiting streams, in order, while there is room; return those whose KV is elsewhere.

        Those are LANDING now, from a prefill worker or (`below`) from a tier; the others RUNNING. May be called while
        a step runs.
        """
        landing = []
        for stream in [stream for stream in self.waiting if stream.loading is None]:
            if len(self.landing) + len(self.running) >= self._seats or not self._reserve(stream):
                break
            self.waiting.remove(stream)
            if stream.target is None and not stream.below:
                self._run(stream)
            else:
                stream.phase = Phase.LANDING
                self.landing.append(stream)
                landing.append(stream)
        return landing

    def join(self, stream: TokenStream) -> None:
        """Let a landed stream decode from the next step on."""
        self.landing.remove(stream)
        self._run(stream)

    def plan(self) -> StepPlan:
        """Return the next step: one token of every decoding stream, then prompt chunks, shortest remaining first.

        At most `token_budget` tokens; beside decodes no more of a prompt than the chunk budget has. A prompt ages
        as in prefill/scheduler.py: it is overtaken only until as many tokens as it has left have been computed.
        Not to be called while a step runs: it may preempt.
        """
        chunks: list[PlannedChunk] = []
        preempted: list[TokenStream] = []
        for stream in list(self.running):
            is_decoding = stream.phase is Phase.RUNNING and stream.sequence.num_uncomputed == 1
            is_decoding = is_decoding and stream.sequence.is_ready
            if is_decoding and self._grow(stream, preempted):
                chunks.append(PlannedChunk(stream, 1))
        budget = self._token_budget - len(chunks)
        if chunks and self._chunk_budget is not None:
            budget = min(budget, self._chunk_budget.tokens())
        for stream in sorted(self.running, key=_rank):
            num_tokens = min(budget, stream.sequence.num_uncomputed)
            if stream.sequence.num_uncomputed > 1 and num_tokens > 0 and stream.sequence.is_ready:
                chunks.append(PlannedChunk(stream, num_tokens))
                budget -= num_tokens
                self._num_scheduled_tokens += num_tokens
        return StepPlan(chunks, preempted)

    def ran(self, chunks: Seq[PlannedChunk], seconds: float) -> None:
        """Note how long a step with these chunks took."""
        if self._chunk_budget is not None:
            sizes = [num_tokens for _, num_tokens in chunks]
            self._chunk_budget.observe(sizes.count(1), sum(size for size in sizes if size > 1), seconds)

    def _reserve(self, stream: TokenStream) -> bool:
        """Take the cached prefix and blocks for the rest, and one token more, so that its first decode needs none."""
        engine, sequence = self._engine, stream.sequence
        block_tokens = engine.layout.block_tokens
        # A landing needs no logits of its own, so even a prompt's last full block may come from the cache.
        hashes = sequence.reusable_hashes(block_tokens) if stream.target is None else sequence.hashes
        matched = engine.pool.match(hashes)
        need = engine.blocks_for(sequence.num_tokens + 1) - len(matched)
        # A block for each running stream stays free, or the newcomer would soon be preempted for one of them.
        if need + len(self.running) > engine.pool.num_available:
            engine.pool.release(matched)
            return False
        sequence.block_table = matched + engine.pool.allocate(need)
        if stream.target is None:
            sequence.num_computed = len(matched) * block_tokens
        stream.first_block = len(matched)
        if stream.num_preemptions and engine.tiers is not None:
            below = hashes[len(matched) :]
            stream.below = below[: engine.tiers.peek(below, engine.block_s)]
        if stream.cached_tokens is None:
            sequence.num_cached = min(len(matched) * block_tokens, sequence.num_prompt_tokens)
            stream.cached_tokens = sequence.num_cached
        return True

    def _grow(self, stream: TokenStream, preempted: list[TokenStream]) -> bool:
        """Give a stream a block for its last token, if need be a younger stream's; False: it lost its own."""
        sequence = stream.sequence
        while len(sequence.block_table) < self._engine.blocks_for(sequence.num_tokens):
            try:
                sequence.block_table += self._engine.pool.allocate(1)
            except OverloadedError:
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is stream:
                    return False
        return True

    def _preempt(self, stream: TokenStream) -> None:
        sequence = stream.sequence
        self.running.remove(stream)
        self._engine.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        stream.target = None
        stream.num_preemptions += 1
        stream.phase = Phase.WAITING
        bisect.insort(self.waiting, stream, key=_number)

    def _run(self, stream: TokenStream) -> None:
        stream.phase = Phase.RUNNING
        bisect.insort(self.running, stream, key=_number)

    def _list_of(self, stream: TokenStream) -> list[TokenStream]:
        match stream.phase:
            case Phase.WAITING:
                return self.waiting
            case Phase.LANDING:
                return self.landing
            case Phase.RUNNING:
                return self.running
            case Phase.ENDED:
                raise AssertionError("the stream has ended")


def _rank(stream: TokenStream) -> tuple[int, int]:
    return stream.sequence.num_uncomputed + stream.arrived_at, stream.number


def _number(stream: TokenStream) -> int:
    return stream.number
