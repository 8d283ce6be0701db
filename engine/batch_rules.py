"""The sampling rules of a batch as tensors: made when its rows change, and kept up with by a token a row and step.

What a step asks of them are operations on all rows at once; Python goes through the rows only when they are others
than in the step before.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import attrgetter, is_, itemgetter
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

_token_ids = attrgetter("token_ids")
_U64 = (1 << 64) - 1


class Filters(NamedTuple):
    """How R rows are drawn from their logits; None where no row has such a rule.

    Attributes:
        temperature: [R, 1] fp32.
        min_p: [R, 1] fp32, its logarithm; -inf: none.
        top_k: [R, 1] i64; the size of the vocabulary: none.
        top_k_max: the greatest top_k of a row that has one; 0: none has.
        top_p: [R, 1] fp32; 1: none.
    """

    temperature: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor | None
    top_k_max: int
    top_p: torch.Tensor | None

    @classmethod
    def of(cls, rules: Seq[SamplingParams], vocab_tokens: int, device: torch.device) -> Self:
        """Make them of R rows' rules."""

        def column(values: Iterable[float], is_used: bool) -> torch.Tensor | None:
            return torch.tensor(list(values), device=device)[:, None] if is_used else None

        temperature = column((params.temperature for params in rules), is_used=True)
        assert temperature is not None
        min_p = column((params.min_p for params in rules), any(params.min_p > 0 for params in rules))
        counts = [min(params.top_k, vocab_tokens) or vocab_tokens for params in rules]
        top_k_max = max((count for count in counts if count < vocab_tokens), default=0)
        return cls(
            temperature,
            None if min_p is None else min_p.log(),
            column(counts, top_k_max > 0),
            top_k_max,
            column((params.top_p for params in rules), any(params.top_p < 1 for params in rules)),
        )


class Cells(NamedTuple):
    """Single logits: row and token of each, [n] i64."""

    rows: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, rows: Seq[int], tokens: Seq[Iterable[int]], device: torch.device) -> Self:
        """Make one of each of `tokens[i]` in row `rows[i]`."""
        ids = [np.fromiter(each, np.int64) for each in tokens]
        sizes = [len(each) for each in ids]
        both = np.stack([np.repeat(np.array(rows, np.int64), sizes), np.concatenate(ids)])
        return cls(*torch.from_numpy(both).to(device))


class SeenTokens:
    """Tokens that came before in some rows, as cells that grow by one for each row and step.

    A token that came twice may have two cells: what is written to both is the same.
    """

    def __init__(self, rows: Seq[int], sequences: Seq[Sequence], starts: Seq[int], device: torch.device) -> None:
        """Begin with the tokens of `sequences[i]` from `starts[i]` on, which belong to logits row `rows[i]`."""
        self._sequences = list(sequences)
        self._rows = torch.tensor(rows, device=device)
        self._all = torch.arange(len(rows), device=device)
        tokens = [_token_ids(sequence)[start:] for sequence, start in zip(sequences, starts, strict=True)]
        first = Cells.of(range(len(rows)), tokens, device)
        self._size = first.ids.shape[0]
        self._room = torch.stack([first.rows, first.ids])

    def follow(self) -> torch.Tensor:
        """Take in the last token of every row; return them, [rows] i64."""
        ids = np.fromiter(map(itemgetter(-1), map(_token_ids, self._sequences)), np.int64, len(self._sequences))
        last = torch.from_numpy(ids).to(self._all.device)
        end = self._size + len(ids)
        if end > self._room.shape[1]:
            self._room = torch.cat([self._room, self._room.new_empty(2, max(end, 1024))], 1)
        self._room[0, self._size : end] = self._all
        self._room[1, self._size : end] = last
        self._size = end
        return last

    @property
    def number(self) -> torch.Tensor:
        """Which of these rows each cell belongs to, [n] i64."""
        return self._room[0, : self._size]

    @property
    def cells(self) -> Cells:
        """Where they are in the logits."""
        return Cells(self._rows[self.number], self._room[1, : self._size])


class _Bias(NamedTuple):
    cells: Cells
    values: torch.Tensor


class _Stops(NamedTuple):
    """Stop tokens that have to wait for `least` tokens of output, [n] i64."""

    cells: Cells
    least: torch.Tensor


class _Repeated(NamedTuple):
    """Repetition counts prompt and output (Keskar et al., CTRL, 2019: section 4.1)."""

    seen: SeenTokens
    penalty: torch.Tensor


class _Counted(NamedTuple):
    """Presence and frequency count the output alone (OpenAI API)."""

    seen: SeenTokens
    presence: torch.Tensor
    frequency: torch.Tensor
    counts: torch.Tensor
    """[rows, V] fp32, how often each token came."""


class BatchRules:
    """Rules of R sequences' rows. Good for as long as the rows are the same sequences, each a token longer a step."""

    def __init__(
        self, sequences: Seq[Sequence], eos_token_ids: frozenset[int], vocab_tokens: int, device: torch.device
    ) -> None:
        self._sequences = list(sequences)
        self._device = device
        self._lengths = self._lengths_now()
        self._prompts = np.array([sequence.num_prompt_tokens for sequence in sequences], np.int64)
        rules = [sequence.sampling for sequence in sequences]
        self.asked = [params.logprobs for params in rules]
        """How many alternatives each row wants to see; None: not even its own logprob."""
        self.has_grammar = any(params.constraint is not None for params in rules)
        random = [row for row, params in enumerate(rules) if not params.is_greedy]
        greedy = [row for row, params in enumerate(rules) if params.is_greedy]
        self.random_rows = torch.tensor(random, dtype=torch.int64, device=device)
        self.greedy_rows = torch.tensor(greedy, dtype=torch.int64, device=device)
        self.filters = Filters.of([rules[row] for row in random], vocab_tokens, device) if random else None
        self._random = np.array(random, np.int64)
        self._seeds = split_mix(np.array([rules[row].seed & _U64 for row in random], np.uint64))
        self._bias = self._make_bias(rules)
        self._stops = self._make_stops(rules, eos_token_ids)
        self._repeated = self._make_repeated(rules)
        self._counted = self._make_counted(rules, vocab_tokens)

    def follow(self, sequences: Seq[Sequence], device: torch.device) -> bool:
        """Go on to a further step; False: these rules are not those of its rows."""
        if len(sequences) != len(self._sequences) or device != self._device:
            return False
        if not all(map(is_, sequences, self._sequences)):
            return False
        before, self._lengths = self._lengths, self._lengths_now()
        if np.array_equal(self._lengths, before):
            return True
        if not np.array_equal(self._lengths, before + 1):
            return False
        if self._repeated is not None:
            self._repeated.seen.follow()
        if self._counted is not None:
            last = self._counted.seen.follow()
            numbers = torch.arange(last.shape[0], device=last.device)
            self._counted.counts[numbers, last] += 1
        return True

    def uniforms(self) -> NDArray[np.float64]:
        """Return this step's number in [0, 1) of each random row."""
        positions = (self._lengths - self._prompts)[self._random]
        return uniform(self._seeds, positions)

    def shift(self, logits: torch.Tensor) -> None:
        """Apply bias, min_tokens and the penalties to [R, V] logits, in place."""
        if self._bias is not None:
            logits[self._bias.cells] += self._bias.values
        if self._stops is not None:
            cells = self._stops.cells
            outputs = torch.from_numpy(self._lengths - self._prompts).to(self._device)[cells.rows]
            # Not -inf: with every token suppressed there would be nothing to choose from.
            floor = torch.finfo(logits.dtype).min
            logits[cells] = torch.where(outputs < self._stops.least, floor, logits[cells])
        if self._repeated is not None:
            cells, penalty = self._repeated.seen.cells, self._repeated.penalty[self._repeated.seen.number]
            scores = logits[cells]
            logits[cells] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if self._counted is not None:
            number, cells = self._counted.seen.number, self._counted.seen.cells
            times = self._counted.counts[number, cells.ids]
            logits[cells] -= self._counted.presence[number] + self._counted.frequency[number] * times

    def _lengths_now(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, map(_token_ids, self._sequences)), np.int64, len(self._sequences))

    def _column(self, values: Seq[float]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)

    def _make_bias(self, rules: Seq[SamplingParams]) -> _Bias | None:
        rows = [row for row, params in enumerate(rules) if params.logit_bias]
        if not rows:
            return None
        cells = Cells.of(rows, [rules[row].logit_bias for row in rows], self._device)
        return _Bias(cells, self._column([value for row in rows for value in rules[row].logit_bias.values()]))

    def _make_stops(self, rules: Seq[SamplingParams], eos_token_ids: frozenset[int]) -> _Stops | None:
        rows = [row for row, params in enumerate(rules) if params.min_tokens > 0]
        stops = [p.stop_token_ids if p.ignore_eos else p.stop_token_ids | eos_token_ids for p in rules]
        if not any(stops[row] for row in rows):
            return None
        cells = Cells.of(rows, [stops[row] for row in rows], self._device)
        least = torch.tensor([params.min_tokens for params in rules], device=self._device)
        return _Stops(cells, least[cells.rows])

    def _make_repeated(self, rules: Seq[SamplingParams]) -> _Repeated | None:
        rows = [row for row, params in enumerate(rules) if params.repetition_penalty != 1.0]
        if not rows:
            return None
        seen = SeenTokens(rows, [self._sequences[row] for row in rows], [0] * len(rows), self._device)
        return _Repeated(seen, self._column([rules[row].repetition_penalty for row in rows]))

    def _make_counted(self, rules: Seq[SamplingParams], vocab_tokens: int) -> _Counted | None:
        rows = [row for row, params in enumerate(rules) if params.presence_penalty or params.frequency_penalty]
        if not rows:
            return None
        starts = [self._sequences[row].num_prompt_tokens for row in rows]
        seen = SeenTokens(rows, [self._sequences[row] for row in rows], starts, self._device)
        counts = torch.zeros(len(rows), vocab_tokens, device=self._device)
        counts.index_put_((seen.number, seen.cells.ids), self._column([1.0]), accumulate=True)
        presence = self._column([rules[row].presence_penalty for row in rows])
        return _Counted(seen, presence, self._column([rules[row].frequency_penalty for row in rows]), counts)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the number in [0, 1) of each output position under each seed, which has been mixed once.

    Two rounds of SplitMix64 (Steele et al., 2014): a function of seed and position and nothing else.
    """
    return (split_mix(seeds ^ positions.astype(np.uint64)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number; overflow wraps around."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
