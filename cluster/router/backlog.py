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


class Steps(NamedTuple):
    """Prompt tokens around a further prompt, in the order in which they are computed, and how steps cut them."""

    budget: int
    """Most of a step; 0: unknown."""
    running: int
    """That were there when the running step began."""
    ahead: int
    """Before the prompt, from the beginning of the running step on."""
    behind: int
    """After it."""

    def riders(self, num_tokens: int) -> int:
        """Return the tokens behind a prompt of `num_tokens` for which it waits: those in the steps that it waits for.

        A step is neither interrupted nor joined, and its prompts end with it: those behind may fill the running step,
        and the one that computes the prompt's last chunk.
        """
        if not self.budget:
            return 0
        running = min(self.budget, self.running)
        at_once = min(self.behind, max(0, running - self.ahead))
        end = max(0, self.ahead - running) + num_tokens  # from the end of the running step on
        return at_once + min(self.behind - at_once, -end % self.budget)


class _Work(NamedTuple):
    prompt: Prompt
    arrived_at: int
    due: int
    """The place of a prompt that is not begun: what is served first is least."""
    added_at: float
    """By the router's clock."""

    @classmethod
    def of(cls, prompt: Prompt, arrived_at: int, added_at: float) -> "_Work":
        return cls(prompt, arrived_at, prompt.num_uncached + arrived_at, added_at)


class Backlog:
    """Prompts by reservation. Owned by the router's loop; plain functions.

    Workers prefill in the order of (tokens left to compute) + (tokens that had been computed at arrival), see
    prefill/scheduler.py. That order is followed here, with the counts of the worker's own reports, and with what of
    each prompt was expected to be cached when it was placed.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.token_budget = 0
        """Most prompt tokens in one of the worker's steps; 0: unknown."""
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
        self._work[key] = _Work.of(prompt, self._computed, now)
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
                self._work = {key: _Work.of(work.prompt, computed, work.added_at) for key, work in self._work.items()}
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
        left_s = current.prompt.seconds * left / uncached
        # Begun, it is ranked by what is left of it; and its running step is not interrupted.
        if left + current.arrived_at <= mine:
            ahead, ahead_s, delayed = left, left_s, 0
        elif self.token_budget:
            ahead = min(left, self.token_budget)
            ahead_s, delayed = left_s * ahead / max(1, left), 1
        else:
            ahead, ahead_s, delayed = left, self._step_s, 1
        total, running, running_s = left, left, ahead_s
        for work in self._work.values():
            if work is current:
                continue
            prompt = work.prompt
            total += prompt.num_uncached
            if work.added_at <= self._computed_at:
                running += prompt.num_uncached
            if work.due <= mine:
                ahead, ahead_s = ahead + prompt.num_uncached, ahead_s + prompt.seconds
            else:
                delayed += 1
        token_s = (self.total_s - current.prompt.seconds + left_s) / max(1, total)
        riders = Steps(self.token_budget, running, ahead, total - ahead).riders(num_uncached)
        running_s = max(running_s, min(running, self.token_budget) * token_s)
        return Wait(max(0.0, ahead_s + riders * token_s - min(since, running_s)), delayed)


_NOTHING = Wait(0.0, 0)
_due = attrgetter("due")
