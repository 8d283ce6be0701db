"""Logits -> token ids, for a whole batch at once. A row's result depends on that row alone.

Order, as in vLLM but for the grammar: bias and suppressed stop tokens, penalties, grammar, temperature, min_p, top_k,
top_p, one uniform draw.
Randomness is a function of (seed, position in the output) and nothing else, so a sequence that moves to another worker
goes on with the same draws.
"""

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Seq

import torch

from engine.grammar import Masks, masks_of
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import TokenOutput

_U64 = (1 << 64) - 1
_LIKELY = 1024
"""Most likely tokens that are looked at before all are sorted for top_p: 0.7 ms against 8 at 49,152 tokens."""


class Sampler:
    """Chooses the next token of each row. Holds no state but what is true of the model."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[TokenOutput]:
        """Choose a token for each row.

        Args:
            logits: [R, V] fp32; may be overwritten.
            sequences: R sequences, whose tokens are what came before.
        """
        asked = [sequence.sampling.logprobs for sequence in sequences]
        logprobs = logits.log_softmax(-1) if any(count is not None for count in asked) else None
        rules = [sequence.sampling for sequence in sequences]
        self._shift(logits, sequences)
        # After all that shifts logits, so that nothing brings back what a grammar excludes.
        masks = masks_of(sequences, logits.shape[1])
        if masks.rows:
            _exclude(logits, masks)
        chosen = logits.argmax(-1)
        random_rows = [row for row, params in enumerate(rules) if not params.is_greedy]
        if random_rows:
            uniforms = [uniform(rules[row].seed, sequences[row].num_output_tokens) for row in random_rows]
            chosen[random_rows] = draw(logits[random_rows], [rules[row] for row in random_rows], uniforms)
        if logprobs is None:
            tokens = [TokenOutput(token_id, None, []) for token_id in chosen.tolist()]
        else:
            tokens = _with_logprobs(chosen, logprobs, asked)
        for row, error in masks.failed.items():
            tokens[row] = TokenOutput(0, None, [], error)
        return tokens

    def _shift(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        """Apply bias, min_tokens and penalties in place: each in one operation for all rows that have it."""
        biased, stopped, repeated, counted = (_Cells(logits.device) for _ in range(4))
        biases: list[float] = []
        for row, sequence in enumerate(sequences):
            params = sequence.sampling
            if params.logit_bias:
                biased.add(row, params.logit_bias, params)
                biases += params.logit_bias.values()
            if sequence.num_output_tokens < params.min_tokens:
                stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos_token_ids
                stopped.add(row, stops, params)
            if params.repetition_penalty != 1.0:
                repeated.add(row, sequence.token_ids, params)
            if params.presence_penalty or params.frequency_penalty:
                counted.add(row, sequence.token_ids[sequence.num_prompt_tokens :], params)
        if biased.rules:
            logits[biased.index()] += torch.tensor(biases, device=logits.device)
        if stopped.rules:
            # Not -inf: with every token suppressed there would be nothing to choose from.
            logits[stopped.index()] = torch.finfo(logits.dtype).min
        _penalize(logits, repeated, counted)


class _Cells:
    """Tokens of some rows, in one list for one operation on the logits."""

    def __init__(self, device: torch.device) -> None:
        self.rules: list[SamplingParams] = []
        """Of each row."""
        self._device = device
        self._rows: list[int] = []
        self._sizes: list[int] = []
        self._ids = array("q")

    def add(self, row: int, token_ids: Collection[int], rules: SamplingParams) -> None:
        """Append tokens of a further row."""
        self.rules.append(rules)
        self._rows.append(row)
        self._sizes.append(len(token_ids))
        self._ids.extend(token_ids)

    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row and token of each cell."""
        ids = torch.frombuffer(self._ids, dtype=torch.int64) if self._ids else torch.empty(0, dtype=torch.int64)
        return self.spread(self._rows), ids.to(self._device)

    def spread(self, values: Seq[float]) -> torch.Tensor:
        """Return each row's value once for each of its cells."""
        return torch.tensor(values).repeat_interleave(torch.tensor(self._sizes)).to(self._device)


def _exclude(logits: torch.Tensor, masks: Masks) -> None:
    """Put -inf where a grammar does not allow a token, in place: indexing with a list of rows would copy them twice."""
    excluded = torch.from_numpy(masks.excluded).to(logits.device)
    if len(masks.rows) == logits.shape[0]:
        logits.masked_fill_(excluded, -torch.inf)
        return
    for row, mask in zip(masks.rows, excluded, strict=True):
        logits[row].masked_fill_(mask, -torch.inf)


def _penalize(logits: torch.Tensor, repeated: _Cells, counted: _Cells) -> None:
    """Apply the three penalties in place.

    Repetition counts prompt and output (Keskar et al., CTRL, 2019: section 4.1), presence and frequency the output
    alone (OpenAI API); all follow from the token ids, so they survive a move. A token that came more than once has as
    many cells, which are all set to the same value.
    """
    if repeated.rules:
        index, penalty = repeated.index(), repeated.spread([params.repetition_penalty for params in repeated.rules])
        scores = logits[index]
        logits[index] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if counted.rules:
        index = counted.index()
        presence = counted.spread([params.presence_penalty for params in counted.rules])
        frequency = counted.spread([params.frequency_penalty for params in counted.rules])
        cells = counted.spread(range(len(counted.rules))), index[1]
        counts = torch.zeros(len(counted.rules), logits.shape[1], device=logits.device)
        counts.index_put_(cells, torch.ones_like(presence), accumulate=True)
        logits[index] = logits[index] - (presence + frequency * counts[cells])


def draw(logits: torch.Tensor, rules: Seq[SamplingParams], uniforms: Seq[float]) -> torch.Tensor:
    """Draw one token from each row's filtered distribution.

    Args:
        logits: [R, V] fp32, before temperature.
        rules: R.
        uniforms: R numbers in [0, 1): where in the cumulative distribution, in order of token id, the token lies.

    Returns:
        [R] i64.
    """
    temperature = torch.tensor([params.temperature for params in rules], device=logits.device)[:, None]
    # The largest becomes 0 first, so that a tiny temperature cannot overflow.
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    scores = keep_likely(scores, rules)
    # In fp64: over a large vocabulary an fp32 running sum loses the unlikely tokens.
    cumulative = scores.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * total
    target = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def keep_likely(scores: torch.Tensor, rules: Seq[SamplingParams]) -> torch.Tensor:
    """Return `scores` with -inf where min_p, top_k or top_p exclude a token.

    Each filter is a threshold, so tokens that tie with the last one kept are kept too and no sort order matters; the
    most likely token always stays.

    Args:
        scores: [R, V] fp32, with the temperature applied and a largest value of 0 in each row.
        rules: R.
    """
    vocab_tokens = scores.shape[1]
    if any(params.min_p > 0 for params in rules):
        # p >= min_p * p_max, and log p_max is 0 here up to a constant of the row.
        floor = torch.tensor([params.min_p for params in rules], device=scores.device).log()[:, None]
        scores = scores.masked_fill(scores < floor, -torch.inf)
    if any(0 < params.top_k < vocab_tokens for params in rules):
        kept = [min(params.top_k, vocab_tokens) or vocab_tokens for params in rules]
        counts = torch.tensor(kept, device=scores.device)[:, None]
        limited = torch.where(counts < vocab_tokens, counts, 1)
        kth = scores.topk(max(count for count in kept if count < vocab_tokens), -1).values.gather(-1, limited - 1)
        scores = scores.masked_fill((scores < kth) & (counts < vocab_tokens), -torch.inf)
    if any(params.top_p < 1 for params in rules):
        top_p = torch.tensor([params.top_p for params in rules], device=scores.device)[:, None]
        scores = scores.masked_fill(scores < _nucleus_floor(scores, top_p), -torch.inf)
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


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of output `position` under `seed`: two rounds of SplitMix64 (Steele et al., 2014)."""
    return (_split_mix(_split_mix(seed & _U64) ^ position) >> 11) * 2.0**-53


def _split_mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _U64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _U64
    return state ^ (state >> 31)


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
