"""What a simulated worker has computed, as a real one reports it."""

from cluster.router.step_model import StepTotals
from loadtest.simulator.stretch import Stretch


class StepCount:
    """Sums since the start. Owned by one simulated worker."""

    def __init__(self) -> None:
        self.totals = StepTotals()

    def add_step(self, seconds: float) -> None:
        """Count one step."""
        totals = self.totals
        self.totals = totals._replace(steps=totals.steps + 1, seconds=totals.seconds + seconds)

    def add_chunk(self, num_tokens: int, num_before: int) -> None:
        """Count a chunk of a step that is counted elsewhere; `num_before` tokens of its prompt precede it."""
        totals = self.totals
        self.totals = totals._replace(
            prompt_tokens=totals.prompt_tokens + num_tokens,
            prompt_pairs=totals.prompt_pairs + num_tokens * (num_before + num_tokens / 2),
        )

    def add_stretch(self, stretch: Stretch) -> None:
        """Count a stretch of decode steps that is over."""
        totals, count, num_sequences = self.totals, stretch.num_steps, stretch.num_sequences
        self.totals = totals._replace(
            steps=totals.steps + count,
            seconds=totals.seconds + stretch.end_of(count) - stretch.start,
            sequences=totals.sequences + count * num_sequences,
            context_tokens=totals.context_tokens
            + count * stretch.num_context
            + num_sequences * count * (count - 1) / 2,
        )
