"""How long a request would take on given workers, and what it would cost others. Pure functions, in seconds."""

from collections.abc import Sequence
from typing import NamedTuple

from cluster.router.question import Candidate, Question

_HOST_TOKEN_S, _DISK_TOKEN_S = 2e-5, 2e-4
"""To bring a token's KV back to the pool: 131 KB at 6.5 GB/s and 650 MB/s."""
_FETCH_S, _FETCH_TOKEN_S = 5e-3, 4e-5
"""To have KV pushed by another worker: the asking, and each token at 3.2 GB/s."""


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

    @property
    def bring_s(self) -> float:
        """The time until all that is not computed is in the pool."""
        return self.restore_s + self.fetch_s

    @property
    def ttft_s(self) -> float:
        """The time to the first token."""
        return self.wait_s + self.bring_s + self.compute_s


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


def pair_up(
    question: Question,
    decode: Candidate,
    prefill: Candidate | None,
    first: PrefillEstimate,
    then: DecodeEstimate,
) -> PairEstimate:
    """Put the two parts of a request together."""
    sent_s = 0.0 if prefill is None else exposed_s(question, decode)
    own_s = first.ttft_s + sent_s + then.wait_s + then.decode_s
    total_s = own_s + first.harm_s + first.evict_s + then.harm_s - first.spread_s
    meets_targets = (question.ttft_target_s is None or first.ttft_s <= question.ttft_target_s) and (
        question.tpot_target_s is None or then.tpot_s <= question.tpot_target_s
    )
    return PairEstimate(decode, prefill, first, then, sent_s, total_s, meets_targets)


def harmless(pairs: Sequence[PairEstimate]) -> PairEstimate:
    """Return the best of these pairs for the request that does not stop sequences which another worker could spare.

    Prefill on a decode worker meets a TTFT target at the cost of all TPOT targets there: nobody is let in by that.
    """
    sparing = [
        pair
        for pair in pairs
        if pair.prefill is not None or pair.decode.prefills_itself or not pair.decode.num_sequences
    ]
    return min(sparing or pairs, key=lambda pair: (not pair.meets_targets, pair.total_s))


def estimate_pair(question: Question, decode: Candidate, prefill: Candidate | None) -> PairEstimate:
    """Estimate a request on one pair."""
    first = estimate_local(question, decode) if prefill is None else estimate_prefill(question, prefill)
    return pair_up(question, decode, prefill, first, estimate_decode(question, decode))


def expected_output(question: Question) -> float:
    """Return how many tokens the answer will have."""
    return max(1.0, min(float(question.max_output_tokens), question.outlook.output_tokens))


def estimate_prefill(question: Question, candidate: Candidate) -> PrefillEstimate:
    """Estimate prefill on a worker that does nothing else."""
    outlook, model = question.outlook, candidate.model
    num_cached, restore_s = _cached(question, candidate)
    fetched_blocks, fetch_s = _fetched(question, candidate, num_cached)
    num_cached = max(num_cached, fetched_blocks * question.block_tokens)
    compute_s = model.prefill_s(question.num_tokens - num_cached, num_cached)
    wait = candidate.backlog.wait(question.num_tokens - num_cached, outlook.now)
    # Those whom it overtakes, and those who will come while there is a queue: on average half as many as are in it.
    queue = max(0, len(candidate.backlog) - 1)
    harm_s = compute_s * (wait.num_delayed + queue / 2)
    evict_s = _evict_s(question, candidate, question.num_tokens - num_cached)
    wait_s = wait.seconds * outlook.wait_factor
    spread_s = _spread_s(question, candidate, num_cached)
    return PrefillEstimate(wait_s, restore_s, compute_s, harm_s, evict_s, spread_s, num_cached, fetch_s, fetched_blocks)


def estimate_local(question: Question, candidate: Candidate) -> PrefillEstimate:
    """Estimate prefill on the decode worker itself, in chunks that ride along with its steps."""
    alone = estimate_prefill(question, candidate)
    # Every sequence of the batch waits while the chunks are computed. A worker that is there to decode is never idle
    # for this: a sequence may come at any moment.
    delayed = candidate.num_sequences if candidate.prefills_itself else max(1, candidate.num_sequences)
    harm_s = alone.harm_s + alone.compute_s * delayed
    step_s = (
        candidate.model.decode_s(candidate.num_sequences, candidate.used_tokens) if candidate.num_sequences else 0.0
    )
    return alone._replace(wait_s=alone.wait_s + step_s, harm_s=harm_s)


def estimate_decode(question: Question, candidate: Candidate) -> DecodeEstimate:
    """Estimate the decoding of all but the first token."""
    model, others = candidate.model, candidate.num_sequences
    steps = expected_output(question) - 1
    own = question.num_tokens + steps / 2  # its context, on average
    tpot_s = model.decode_s(others + 1, candidate.used_tokens + own)
    # Others are half way through, on average; so much of their time is shared.
    harm_s = others * steps / 2 * (model.sequence_s + model.context_s * own)
    wait_s = _room_s(candidate, question.num_tokens + steps * (1 + others / 2), steps * tpot_s)
    return DecodeEstimate(wait_s, tpot_s, steps * tpot_s, harm_s)


def exposed_s(question: Question, decode: Candidate) -> float:
    """Return how long the sequence waits for its KV after its first token."""
    missing = question.num_tokens - question.hits.of(decode.worker_id) * question.block_tokens
    return max(0, missing) * decode.exposed_token_s


def _cached(question: Question, candidate: Candidate) -> tuple[int, float]:
    """Return the tokens to take from the cache, and the time to bring them back; what is slow to bring is computed."""
    hits, block_tokens, worker_id = question.hits, question.block_tokens, candidate.worker_id
    most = question.num_tokens - 1  # the last token is always computed, for its logits
    total = min(hits.of(worker_id) * block_tokens, most)
    if hits.levels is hits.in_pool or not total:
        return total, 0.0
    pool = min(hits.pool_of(worker_id) * block_tokens, most)
    memory = max(pool, min(hits.memory_of(worker_id) * block_tokens, most))
    token_s = candidate.model.token_s + candidate.model.pair_s * question.num_tokens
    cached, restore_s = pool, 0.0
    if token_s > _HOST_TOKEN_S:
        cached, restore_s = memory, (memory - pool) * _HOST_TOKEN_S
        if token_s > _DISK_TOKEN_S:
            cached, restore_s = total, restore_s + (total - memory) * _DISK_TOKEN_S
    return cached, restore_s


def _fetched(question: Question, candidate: Candidate, num_cached: int) -> tuple[int, float]:
    """Return the leading blocks to have after a fetch, and its time; (0, 0) where computing them is faster."""
    if question.deepest is None:
        return 0, 0.0
    num_blocks = min(question.deepest.num_blocks, (question.num_tokens - 1) // question.block_tokens)
    missing = num_blocks * question.block_tokens - num_cached
    fetch_s = _FETCH_S + missing * _FETCH_TOKEN_S
    if missing <= 0:
        return 0, 0.0
    model, uncached = candidate.model, question.num_tokens - num_cached
    saved_s = model.prefill_s(uncached, num_cached) - model.prefill_s(uncached - missing, num_cached + missing)
    return (num_blocks, fetch_s) if fetch_s < saved_s else (0, 0.0)


def _spread_s(question: Question, candidate: Candidate, num_cached: int) -> float:
    fresh = question.hot.num_blocks * question.block_tokens - num_cached
    return question.hot.share * candidate.model.prefill_s(fresh, num_cached) if fresh > 0 else 0.0


def _evict_s(question: Question, candidate: Candidate, num_new: int) -> float:
    evicted = max(0, min(num_new, candidate.pool_tokens) - candidate.free_tokens)
    return evicted * candidate.model.token_s * question.outlook.reuse_share


def _room_s(candidate: Candidate, needed: float, residence_s: float) -> float:
    """Return how long it takes until so many tokens have room, if sequences stay for `residence_s`."""
    short = needed - (candidate.pool_tokens - candidate.used_tokens)
    if short <= 0 or not candidate.pool_tokens:
        return 0.0
    return residence_s * short / max(1, candidate.used_tokens)
