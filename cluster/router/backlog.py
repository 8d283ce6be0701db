"""Prompts that were placed on one worker and whose first token was not seen: how long a further one would wait."""

from operator import attrgetter
from typing import NamedTuple


class Wait(NamedTuple):
    """What a further prompt would meet, and do to others."""

    seconds: float
    num_delayed: int
    """Prompts that it would overtake, and which it would delay by as long as it takes itself."""


class Prompt(NamedTuple):
    """A prompt to prefill."""

    num_tokens: int
    num_uncached: int
    """Of these: to be computed."""
    seconds: float
    """Predicted, without the wait."""


class _Work(NamedTuple):
    prompt: Prompt
    arrived_at: int
    due: int
    """The place of a prompt that is not begun: what is served first is least."""

    @classmethod
    def of(cls, prompt: Prompt, arrived_at: int) -> "_Work":
        return cls(prompt, arrived_at, prompt.num_uncached + arrived_at)


class Backlog:
    """Prompts by reservation. Owned by the router's loop; plain functions.

    Workers prefill in the order of (tokens left to compute) + (tokens that had been computed at arrival), see
    prefill/scheduler.py. That order is followed here, with the counts of the worker's own reports, and with what of
    each prompt was expected to be cached when it was placed.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._work: dict[object, _Work] = {}
        self._computed = 0
        """Prompt tokens, by the worker's count."""
        self._computed_at = 0.0
        """When that last changed, or the worker had been idle."""
        self._begun_at = 0
        """The count when the worker turned to what it is at."""
        self._step_s = 0.0

    def __len__(self) -> int:
        return len(self._work)

    def add(self, key: object, prompt: Prompt, now: float) -> None:
        """Take note of a prompt; `key` is not here yet."""
        assert key not in self._work
        if not self._work:
            self._computed_at, self._begun_at = now, self._computed
        self._work[key] = _Work.of(prompt, self._computed)
        self.total_s += prompt.seconds

    def remove(self, key: object, prefilled_at: float | None = None) -> None:
        """Forget a prompt; one that is not here is all right.

        Args:
            key: of the prompt.
            prefilled_at: when its first token was seen; None: it was not prefilled, and will not be.
        """
        work = self._work.pop(key, None)
        if work is None:
            return
        # What rounding leaves must not add up over millions of prompts.
        self.total_s = self.total_s - work.prompt.seconds if self._work else 0.0
        if prefilled_at is None:
            self._begun_at = self._computed
            return
        # The first token is here before the worker's count of what was computed for it: that is not the next one's.
        self._begun_at = max(self._computed, self._begun_at + work.prompt.num_uncached)
        self._computed_at = prefilled_at

    def progressed(self, computed: int, step_s: float, now: float) -> None:
        """Take the worker's count of prompt tokens and what its last steps took."""
        if computed != self._computed:
            if computed < self._computed:  # another life
                self._work = {key: _Work.of(work.prompt, computed) for key, work in self._work.items()}
                self._begun_at = computed
            self._computed, self._computed_at, self._step_s = computed, now, step_s

    def wait(self, num_uncached: int, now: float) -> Wait:
        """Return what a further prompt, so many tokens of which are to be computed, would meet here now."""
        if not self._work:
            return _NOTHING
        mine, since = num_uncached + self._computed, now - self._computed_at
        current = min(self._work.values(), key=_due)
        uncached = max(1, current.prompt.num_uncached)
        left = max(0, min(uncached, uncached - self._computed + self._begun_at))
        # Begun, it is ranked by what is left of it; and its running step is not interrupted.
        if left + current.arrived_at <= mine:
            ahead_s, delayed = max(0.0, current.prompt.seconds * left / uncached - since), 0
        else:
            ahead_s, delayed = max(0.0, self._step_s - since), 1
        for work in self._work.values():
            if work is current:
                continue
            if work.due <= mine:
                ahead_s += work.prompt.seconds
            else:
                delayed += 1
        return Wait(ahead_s, delayed)


_NOTHING = Wait(0.0, 0)
_due = attrgetter("due")
