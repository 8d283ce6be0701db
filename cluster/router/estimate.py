"""How long a request would take on given workers, and what it would cost others. Pure functions, in seconds."""

from typing import NamedTuple

from cluster.router.fetch_model import ASK_S
from cluster.router.question import Candidate, Question

_HOST_BYTES_S, _DISK_BYTES_S = 6.5e9, 6.5e8
"""At which KV is brought back to the pool."""


class PrefillEstimate(NamedTuple):
    """Prefill on one worker."""

    wait_s: float
    """Prompts ahead."""
    restore_s: float
    """Cached blocks are brought back from a slower tier."""
    compute_s: float
    """The rest is computed."""
    harm_s: float
    """By which other requests are delayed, all together."""
    evict_s: float
    """To compute again what is evicted for it, as far as somebody will ask for it."""
    spread_s: float
    """Of `compute_s`: spent on a copy of a hot prefix, and as good as paid by the requests that will find it."""
    num_cached: int
    """Tokens that need not be computed."""
    fetch_s: float = 0.0
    """Blocks are brought from another worker."""
    fetched_blocks: int = 0
    """Leading blocks that another worker is to push as far as they are missing; 0: none."""
    meets_target: bool = True
    """The TTFT target; there may be none."""

    @property
    def bring_s(self) -> float:
        """The time until all that is not computed is in the pool."""
        return self.restore_s + self.fetch_s

    @property
    def ttft_s(self) -> float:
        """The time to the first token."""
        # Written out, here and below: both are read for each pair that is weighed, and a call costs more than the sum.
        return self.wait_s + (self.restore_s + self.fetch_s) + self.compute_s

    @property
    def cost_s(self) -> float:
        """The request's own time and the harm to others."""
        ttft_s = self.wait_s + (self.restore_s + self.fetch_s) + self.compute_s
        return ttft_s + self.harm_s + self.evict_s - self.spread_s


class DecodeEstimate(NamedTuple):
    """Decode on one worker."""

    wait_s: float
    """Until there is room in the pool."""
    tpot_s: float
    """A step's time with this sequence in the batch."""
    decode_s: float
    """All expected steps."""
    harm_s: float
    """By which the batch's other sequences are delayed, all together."""
    exposed_s: float = 0.0
    """From the first token until all KV has landed, where another worker prefills."""
    meets_target: bool = True
    """The TPOT target; there may be none."""

    @property
    def cost_s(self) -> float:
        """The request's own time and the harm to others, but for the transfer."""
        return self.wait_s + self.decode_s + self.harm_s


class PairEstimate(NamedTuple):
    """A request on one pair of workers."""

    decode: Candidate
    prefill: Candidate | None
    """None: the decode worker prefills."""
    first: PrefillEstimate
    then: DecodeEstimate
    exposed_s: float
    """From the first token until all KV has landed."""
    total_s: float
    """The request's own time and the harm to others."""
    meets_targets: bool

    def terms(self) -> dict[str, float]:
        """Return the parts of the total, by name."""
        first, then = self.first, self.then
        return {
            "queue": first.wait_s,
            "restore": first.restore_s,
            "fetch": first.fetch_s,
            "prefill": first.compute_s,
            "transfer": self.exposed_s,
            "room": then.wait_s,
            "decode": then.decode_s,
            "harm_prefill": first.harm_s,
            "harm_decode": then.harm_s,
            "evict": first.evict_s,
            "spread": -first.spread_s,
        }


def pair_up(decode: Candidate, prefill: Candidate | None, first: PrefillEstimate, then: DecodeEstimate) -> PairEstimate:
    """Put the two parts of a request together."""
    sent_s = 0.0 if prefill is None else then.exposed_s
    total_s = first.cost_s + (then.cost_s + sent_s)
    return PairEstimate(decode, prefill, first, then, sent_s, total_s, first.meets_target and then.meets_target)


def estimate_pair(question: Question, decode: Candidate, prefill: Candidate | None) -> PairEstimate:
    """Estimate a request on one pair."""
    first = estimate_local(question, decode) if prefill is None else estimate_prefill(question, prefill)
    return pair_up(decode, prefill, first, estimate_decode(question, decode))


def expected_output(question: Question) -> float:
    """Return how many tokens the answer will have."""
    return max(1.0, min(float(question.max_output_tokens), question.outlook.output_tokens))


def estimate_prefill(question: Question, candidate: Candidate) -> PrefillEstimate:
    """Estimate prefill on a worker that does nothing else."""
    return _estimate(question, candidate, 0.0, 0)


def estimate_local(question: Question, candidate: Candidate) -> PrefillEstimate:
    """Estimate prefill on the decode worker itself, in chunks that ride along with its steps."""
    # Every sequence of the batch waits while the chunks are computed. A worker that is there to decode is never idle
    # for this: a sequence may come at any moment.
    others = candidate.num_sequences
    delayed = others if candidate.prefills_itself else max(1, others)
    return _estimate(question, candidate, candidate.step_s if others else 0.0, delayed)


def _estimate(question: Question, candidate: Candidate, step_s: float, num_decoding: int) -> PrefillEstimate:
    """Estimate prefill beside so many sequences that decode, the running step of which takes `step_s`."""
    outlook, num_tokens = question.outlook, question.num_tokens
    num_cached, restore_s = _cached(question, candidate)
    num_missing = num_tokens - num_cached  # whether it is computed or fetched, it takes room in the pool
    compute_s = candidate.prefill_s(num_missing, num_cached)
    fetch_s, fetched_blocks = 0.0, 0
    if (fetch := _fetch(question, candidate, num_cached, compute_s)) is not None:
        fetch_s, fetched_blocks, num_cached, compute_s = fetch
    num_new, backlog = num_tokens - num_cached, candidate.backlog
    wait = backlog.wait(num_new, outlook.now)
    # Those whom it overtakes, and those who will come while there is a queue: on average half as many as are in it.
    queue = max(0, len(backlog) - 1)
    harm_s = compute_s * (wait.num_delayed + queue / 2) + compute_s * num_decoding
    wait_s = wait.seconds * outlook.wait_factor + step_s
    evict_s = _evict_s(question, candidate, num_missing) if num_missing > candidate.free_tokens else 0.0
    spread_s = _spread_s(question, candidate, num_cached) if question.hot.num_blocks else 0.0
    target_s = question.ttft_target_s
    meets_target = target_s is None or wait_s + (restore_s + fetch_s) + compute_s <= target_s
    return PrefillEstimate(
        wait_s, restore_s, compute_s, harm_s, evict_s, spread_s, num_cached, fetch_s, fetched_blocks, meets_target
    )


def estimate_decode(question: Question, candidate: Candidate) -> DecodeEstimate:
    """Estimate the decoding of all but the first token."""
    model, others = candidate.model, candidate.num_sequences
    steps = expected_output(question) - 1
    own = question.num_tokens + steps / 2  # its context, on average
    tpot_s = model.decode_s(others + 1, candidate.used_tokens + own)
    # Others are half way through, on average; so much of their time is shared.
    harm_s = others * steps / 2 * (model.sequence_s + model.context_s * own)
    wait_s = _room_s(candidate, question.num_tokens + steps * (1 + others / 2), steps * tpot_s)
    missing = question.num_tokens - question.hits.of(candidate.worker_id) * question.block_tokens
    exposed_s = max(0, missing) * candidate.exposed_token_s
    target_s = question.tpot_target_s
    return DecodeEstimate(
        wait_s, tpot_s, steps * tpot_s, harm_s, exposed_s, meets_target=target_s is None or tpot_s <= target_s
    )


def _cached(question: Question, candidate: Candidate) -> tuple[int, float]:
    """Return the tokens to take from the cache, and the time to bring them back; what is slow to bring is computed."""
    hits, block_tokens, worker_id = question.hits, question.block_tokens, candidate.worker_id
    most = question.num_tokens - 1  # the last token is always computed, for its logits
    total = hits.of(worker_id) * block_tokens
    if total > most:
        total = most
    if hits.levels is hits.in_pool or not total:
        return total, 0.0
    pool = min(hits.pool_of(worker_id) * block_tokens, most)
    memory = max(pool, min(hits.memory_of(worker_id) * block_tokens, most))
    token_s = candidate.model.token_s + candidate.model.pair_s * question.num_tokens
    cached, restore_s = pool, 0.0
    host_token_s, disk_token_s = candidate.token_bytes / _HOST_BYTES_S, candidate.token_bytes / _DISK_BYTES_S
    if token_s > host_token_s:
        cached, restore_s = memory, (memory - pool) * host_token_s
        if token_s > disk_token_s:
            cached, restore_s = total, restore_s + (total - memory) * disk_token_s
    return cached, restore_s


class _Fetch(NamedTuple):
    """A prompt's beginning is pushed by another worker."""

    seconds: float
    num_blocks: int
    """Leading blocks to have after it."""
    num_cached: int
    """Tokens, likewise."""
    compute_s: float
    """Of the rest."""


def _fetch(question: Question, candidate: Candidate, num_cached: int, compute_s: float) -> _Fetch | None:
    """Return what a fetch would bring; None where computing, in `compute_s`, is faster."""
    if question.deepest is None:
        return None
    num_blocks = min(question.deepest.num_blocks, (question.num_tokens - 1) // question.block_tokens)
    cached = num_blocks * question.block_tokens
    if cached <= num_cached:
        return None
    fetch_s = ASK_S + (cached - num_cached) * candidate.fetch_token_s
    rest_s = candidate.prefill_s(question.num_tokens - cached, cached)
    return _Fetch(fetch_s, num_blocks, cached, rest_s) if fetch_s < compute_s - rest_s else None


def _spread_s(question: Question, candidate: Candidate, num_cached: int) -> float:
    fresh = question.hot.num_blocks * question.block_tokens - num_cached
    return question.hot.share * candidate.prefill_s(fresh, num_cached) if fresh > 0 else 0.0


def _evict_s(question: Question, candidate: Candidate, num_missing: int) -> float:
    evicted = max(0, min(num_missing, candidate.pool_tokens) - candidate.free_tokens)
    # Whoever asks for it later has it computed again, or pushed by another worker that still has it.
    return evicted * min(candidate.model.token_s, candidate.fetch_token_s) * question.outlook.reuse_share


def _room_s(candidate: Candidate, needed: float, residence_s: float) -> float:
    """Return how long it takes until so many tokens have room, if sequences stay for `residence_s`."""
    short = needed - (candidate.pool_tokens - candidate.used_tokens)
    if short <= 0 or not candidate.pool_tokens:
        return 0.0
    return residence_s * short / max(1, candidate.used_tokens)
