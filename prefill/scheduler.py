"""Which prompts are prefilled in the next step, and how much of each. Pure: no clock, no I/O.

Least left to compute first, with ageing: a prompt's rank is that plus the tokens that were scheduled before it came. Of
a prompt without blocks it is what the prefix cache does not hold now, so a long prompt of which little is new does not
queue behind a shorter one. A prompt with R tokens left can be overtaken only by prompts that arrive before R further
tokens have been computed, however busy the worker is: nobody starves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from common.errors import OverloadedError
from engine.bookkeeping import BookedSequence, Bookkeeping


@dataclass(slots=True, eq=False)
class Prompt:
    """A sequence on its way through the scheduler, which alone changes these fields."""

    sequence: BookedSequence
    number: int = 0
    """Counts arrivals."""
    arrived_at: int = 0
    """Tokens that the scheduler had given out when the prompt arrived."""
    is_admitted: bool = False
    """Whether its blocks are reserved."""
    is_loading: bool = False
    """Whether part of its prefix is on its way into the cache: it is admitted after that."""


P = TypeVar("P", bound=Prompt)


class PlannedChunk(NamedTuple, Generic[P]):
    """The next `num_tokens` of a prompt."""

    prompt: P
    num_tokens: int


class PromptScheduler(Generic[P]):
    """Prompts that still have tokens to compute, and the reservation of their blocks.

        add ──► waiting ──plan: blocks for the whole prompt──► admitted ──plan: chunks──► all computed, gone
                   └────────────────── remove ────────────────────┘

    A prompt is admitted only when its first chunk is planned, so that it finds what prompts before it left in the
    prefix cache; one whose prefix is being fetched lets others pass meanwhile. Blocks are taken here and given back by
    the owner. Owned by the prefill loop.
    """

    def __init__(self, books: Bookkeeping, token_budget: int) -> None:
        assert token_budget > 0
        self._books = books
        self._token_budget = token_budget
        self._prompts: list[P] = []
        self._num_arrived = 0
        self._num_scheduled_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return sum(not prompt.is_admitted for prompt in self._prompts)

    @property
    def num_admitted(self) -> int:
        """Prompts being prefilled."""
        return sum(prompt.is_admitted for prompt in self._prompts)

    @property
    def queued_tokens(self) -> int:
        """Tokens not yet computed of all prompts here."""
        return sum(prompt.sequence.num_uncomputed for prompt in self._prompts)

    def add(self, prompt: P) -> None:
        """Queue a prompt."""
        self._num_arrived += 1
        prompt.number = self._num_arrived
        prompt.arrived_at = self._num_scheduled_tokens
        self._prompts.append(prompt)

    def remove(self, prompt: P) -> None:
        """Plan no further chunk of a prompt. Its blocks, if it has any, stay with it."""
        if prompt in self._prompts:
            self._prompts.remove(prompt)

    def plan(self) -> list[PlannedChunk[P]]:
        """Return the chunks of the next step, at most `token_budget` tokens, and admit prompts that they begin.

        Call it again only after the engine has completed the chunks. When the best waiting prompt does not fit in the
        pool, those behind it wait as well, or a long prompt would never get its blocks.
        """
        chunks = []
        budget = self._token_budget
        for prompt in self._admitted_in_order():
            num_tokens = min(budget, prompt.sequence.num_uncomputed)
            chunks.append(PlannedChunk(prompt, num_tokens))
            budget -= num_tokens
            if budget == 0:
                break
        self._num_scheduled_tokens += self._token_budget - budget
        return chunks

    def _admitted_in_order(self) -> Iterator[P]:
        is_full = False
        for prompt in sorted(self._prompts, key=self._rank):
            if prompt.is_loading:
                continue
            if not prompt.is_admitted:
                is_full = is_full or not self._admit(prompt)
                if is_full:
                    continue
            yield prompt

    def _admit(self, prompt: P) -> bool:
        books, sequence = self._books, prompt.sequence
        matched = books.pool.match(sequence.reusable_hashes(books.block_tokens))
        try:
            rest = books.pool.allocate(books.blocks_for(sequence.num_tokens) - len(matched))
        except OverloadedError:
            books.pool.release(matched)
            return False
        sequence.block_table = matched + rest
        sequence.num_computed = len(matched) * books.block_tokens
        sequence.num_cached = min(sequence.num_computed, sequence.num_prompt_tokens)
        prompt.is_admitted = True
        return True

    def _rank(self, prompt: P) -> tuple[int, int]:
        left = prompt.sequence.num_uncomputed
        if not prompt.is_admitted:
            left -= self._books.num_held(prompt.sequence)
        return left + prompt.arrived_at, prompt.number
