"""Logits -> token ids, for a whole batch at once. A row's result depends on that row alone.

Order, as in vLLM but for the grammar: bias and suppressed stop tokens, penalties, grammar, temperature, min_p, top_k,
top_p, one uniform draw.
Randomness is a function of (seed, position in the output) and nothing else, so a sequence that moves to another worker
goes on with the same draws. Greedy rows that nothing else is asked of do not come here: see engine.batch.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from engine.batch_rules import BatchRules, Filters
from engine.grammar import Masks, masks_of
from engine.sequence import Sequence
from engine.step import TokenOutput

_RUN = 128
"""Tokens that are drawn as one before one of them is, so that running sums of all are not needed."""
_LIKELY = 1024
"""Most likely tokens that are looked at before all are sorted for top_p: 0.7 ms against 8 at 49,152 tokens."""


class Sampler:
    """Chooses the next token of each row. Owned by the compute thread.

    What it keeps from step to step only saves work: the rules of a batch, until its rows are others.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._rules: BatchRules | None = None

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[TokenOutput]:
        """Choose a token for each row.

        Args:
            logits: [R, V] fp32; may be overwritten.
            sequences: R sequences, whose tokens are what came before.
        """
        rules = self._rules_of(sequences, logits)
        logprobs = logits.log_softmax(-1) if any(count is not None for count in rules.asked) else None
        rules.shift(logits)
        failed = {}
        if rules.has_grammar:
            # After all that shifts logits, so that nothing brings back what a grammar excludes.
            masks = masks_of(sequences, logits.shape[1])
            _exclude(logits, masks)
            failed = masks.failed
        chosen = _choose(logits, rules)
        if logprobs is None:
            tokens = [TokenOutput(token_id, None, []) for token_id in chosen.tolist()]
        else:
            tokens = _with_logprobs(chosen, logprobs, rules.asked)
        for row, error in failed.items():
            tokens[row] = TokenOutput(0, None, [], error)
        return tokens

    def _rules_of(self, sequences: Seq[Sequence], logits: torch.Tensor) -> BatchRules:
        if self._rules is None or not self._rules.follow(sequences, logits.device):
            self._rules = BatchRules(sequences, self._eos_token_ids, logits.shape[1], logits.device)
        return self._rules


def _choose(logits: torch.Tensor, rules: BatchRules) -> torch.Tensor:
    """Return [R] i64: the greatest logit of greedy rows, and what is drawn for the others."""
    if rules.filters is None:
        return logits.argmax(-1)
    if not rules.greedy_rows.shape[0]:
        return draw(logits, rules.filters, rules.uniforms())
    chosen = rules.greedy_rows.new_empty(logits.shape[0])
    chosen[rules.greedy_rows] = logits[rules.greedy_rows].argmax(-1)
    chosen[rules.random_rows] = draw(logits[rules.random_rows], rules.filters, rules.uniforms())
    return chosen


def _exclude(logits: torch.Tensor, masks: Masks) -> None:
    """Put -inf where a grammar does not allow a token, in place: indexing with a list of rows would copy them twice."""
    if not masks.rows:
        return
    excluded = torch.from_numpy(masks.excluded).to(logits.device)
    if len(masks.rows) == logits.shape[0]:
        logits.masked_fill_(excluded, -torch.inf)
        return
    for row, mask in zip(masks.rows, excluded, strict=True):
        logits[row].masked_fill_(mask, -torch.inf)


def draw(logits: torch.Tensor, filters: Filters, uniforms: NDArray[np.float64]) -> torch.Tensor:
    """Draw one token from each row's filtered distribution.

    Args:
        logits: [R, V] fp32, before temperature.
        filters: of R rows.
        uniforms: R numbers in [0, 1): where in the cumulative distribution, in order of token id, the token lies.

    Returns:
        [R] i64.
    """
    # The largest becomes 0 first, so that a tiny temperature cannot overflow.
    scores = (logits - logits.amax(-1, keepdim=True)) / filters.temperature
    scores = keep_likely(scores, filters)
    missing = -logits.shape[1] % _RUN
    weights = (pad(scores.exp_(), (0, missing)) if missing else scores.exp_()).view(logits.shape[0], -1, _RUN)
    # First the run of tokens, then the token in it. Running sums in fp64: fp32 would lose the unlikely ones.
    runs = weights.sum(-1).double().cumsum(-1)
    target = torch.from_numpy(uniforms).to(logits.device)[:, None] * runs[:, -1:]
    run = _first_above(runs, target)
    before = pad(runs, (1, 0)).gather(-1, run)
    inside = weights.gather(1, run[..., None].expand(-1, -1, _RUN))[:, 0].double().cumsum(-1)
    token = run * _RUN + _first_above(inside, target - before)
    return token[:, 0].clamp_(max=logits.shape[1] - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return [R, 1] i64, the first place of each row of [R, N] running sums that is above the target, [R, 1]."""
    total = cumulative[:, -1:]
    below = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below, right=True).clamp_(max=cumulative.shape[1] - 1)


def keep_likely(scores: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return `scores` with -inf where min_p, top_k or top_p exclude a token.

    Each filter is a threshold, so tokens that tie with the last one kept are kept too and no sort order matters; the
    most likely token always stays.

    Args:
        scores: [R, V] fp32, with the temperature applied and a largest value of 0 in each row.
        filters: of R rows.
    """
    if filters.min_p is not None:
        # p >= min_p * p_max, and log p_max is 0 here up to a constant of the row.
        scores = scores.masked_fill(scores < filters.min_p, -torch.inf)
    if filters.top_k is not None:
        is_limited = filters.top_k < scores.shape[1]
        kth = scores.topk(filters.top_k_max, -1).values.gather(-1, filters.top_k.where(is_limited, 1) - 1)
        scores = scores.masked_fill((scores < kth) & is_limited, -torch.inf)
    if filters.top_p is not None:
        scores = scores.masked_fill(scores < _nucleus_floor(scores, filters.top_p), -torch.inf)
    return scores


def _nucleus_floor(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return [R, 1], the score of the last token needed to reach `top_p`; -inf where it is 1."""
    log_total = scores.double().logsumexp(-1, keepdim=True)
    count = min(_LIKELY, scores.shape[1])
    while True:
        likely = scores.topk(count, -1).values
        mass = (likely.double() - log_total).exp().cumsum(-1)
        # A token is needed as long as those before it have not reached top_p.
        needed = (mass < top_p).sum(-1, keepdim=True)
        if count == scores.shape[1] or bool(((needed < count) | (top_p >= 1)).all()):
            floor = likely.gather(-1, needed.clamp(max=count - 1))
            return torch.where(top_p < 1, floor, -torch.inf)
        count = scores.shape[1]


def _with_logprobs(chosen: torch.Tensor, logprobs: torch.Tensor, asked: Seq[int | None]) -> list[TokenOutput]:
    """Attach logprobs of the model's own distribution: before bias, penalties and temperature."""
    most = min(max(count or 0 for count in asked), logprobs.shape[1])
    top = logprobs.topk(most, -1)
    values, ids = top.values.tolist(), top.indices.tolist()
    own = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    outputs = []
    for row, (token_id, count) in enumerate(zip(chosen.tolist(), asked, strict=True)):
        if count is None:
            outputs.append(TokenOutput(token_id, None, []))
        else:
            outputs.append(
                TokenOutput(token_id, own[row], list(zip(ids[row][:count], values[row][:count], strict=True)))
            )
    return outputs
