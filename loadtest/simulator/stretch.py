"""Decode steps whose batch does not change, taken together: their times follow from a formula.

Each step adds a token to every sequence's context, so k steps take k * (fixed + context_s * C) + context_s * n * k *
(k - 1) / 2 seconds: a simulation need not visit each of them.
"""

import math
from dataclasses import dataclass

from loadtest.simulator.profile import StepCost


@dataclass(slots=True)
class Stretch:
    """Steps of a decode worker, one after the other."""

    start: float
    num_steps: int
    first_s: float
    """Of the first step."""
    growth_s: float
    """By which each step is longer than the one before."""
    num_sequences: int
    """That decode."""
    num_context: int
    """Sum of their lengths in the first step."""

    @classmethod
    def of(
        cls,
        cost: StepCost,
        start: float,
        num_steps: int,
        num_sequences: int,
        num_context: int,
        extra_s: float,
    ) -> "Stretch":
        """Return the stretch of a batch.

        Args:
            cost: of a step.
            start: of the first step.
            num_steps: at least 1.
            num_sequences: that decode.
            num_context: sum of their lengths in the first step.
            extra_s: prompt chunks that ride along; only with one step.
        """
        assert num_steps == 1 or not extra_s
        first_s = cost.base_s + extra_s + cost.decode_s(num_sequences, num_context)
        return cls(start, num_steps, first_s, cost.context_s * num_sequences, num_sequences, num_context)

    def end_of(self, count: int) -> float:
        """Return when the first `count` steps are over."""
        return self.start + count * self.first_s + self.growth_s * count * (count - 1) / 2

    def durations(self) -> list[float]:
        """Return the seconds of each step."""
        first_s, growth_s = self.first_s, self.growth_s
        return [first_s + growth_s * step for step in range(self.num_steps)]

    def steps_begun(self, now: float) -> int:
        """Return how many steps have begun before `now`, at least 1: a newcomer waits for the last one's end."""
        elapsed = now - self.start
        square, linear = self.growth_s / 2, self.first_s - self.growth_s / 2
        # The stable form of the quadratic formula: square may be 0.
        root = 2 * elapsed / (linear + math.sqrt(linear * linear + 4 * square * elapsed))
        return min(self.num_steps, max(1, math.ceil(root - 1e-9)))
