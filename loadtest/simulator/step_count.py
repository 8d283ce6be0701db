"""What a simulated worker has computed, as a real one reports it."""

from cluster.router.step_model import StepTotals
from loadtest.simulator.stretch import Stretch


class StepCount:
    """Sums since the start. Owned by one simulated worker."""

    __slots__ = ("_context_tokens", "_prompt_pairs", "_prompt_tokens", "_seconds", "_sequences", "_steps")

    def __init__(self) -> None:
        self._steps = self._prompt_tokens = self._sequences = 0
        self._seconds = self._prompt_pairs = self._context_tokens = 0.0

    @property
    def totals(self) -> StepTotals:
        """As a worker reports them."""
        return StepTotals(
            self._steps,
            self._seconds,
            self._prompt_tokens,
            self._prompt_pairs,
            self._sequences,
            self._context_tokens,
        )

    def add_step(self, seconds: float) -> None:
        """Count one step."""
        self._steps += 1
        self._seconds += seconds

    def add_chunk(self, num_tokens: int, num_before: int) -> None:
        """Count a chunk of a step that is counted elsewhere; `num_before` tokens of its prompt precede it."""
        self._prompt_tokens += num_tokens
        self._prompt_pairs += num_tokens * (num_before + num_tokens / 2)

    def add_stretch(self, stretch: Stretch) -> None:
        """Count a stretch of decode steps that is over."""
        count, num_sequences = stretch.num_steps, stretch.num_sequences
        self._steps += count
        self._seconds += stretch.end_of(count) - stretch.start
        self._sequences += count * num_sequences
        self._context_tokens += count * stretch.num_context + num_sequences * count * (count - 1) / 2
