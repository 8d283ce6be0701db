"""What a worker's steps have computed and how long they took: from this the router learns what a step costs."""

from collections.abc import Sequence as Seq

from baton_pb.v1 import worker_pb2
from engine.step import ScheduledChunk


class StepCount:
    """Sums since the start of the worker. Owned by its loop."""

    def __init__(self) -> None:
        self._totals = worker_pb2.StepTotals()

    def begin(self, batch: Seq[ScheduledChunk]) -> worker_pb2.StepTotals:
        """Return what a step is about to compute; to be called before its results are applied."""
        amounts = worker_pb2.StepTotals(steps=1)
        for sequence, num_tokens in batch:
            computed = sequence.num_computed
            if num_tokens == 1 and computed >= sequence.num_prompt_tokens:
                amounts.sequences += 1
                amounts.context_tokens += computed
            else:
                amounts.prompt_tokens += num_tokens
                amounts.prompt_pairs += num_tokens * (computed + num_tokens / 2)
        return amounts

    def end(self, amounts: worker_pb2.StepTotals, seconds: float) -> None:
        """Add a step."""
        totals = self._totals
        totals.steps += amounts.steps
        totals.seconds += seconds
        totals.prompt_tokens += amounts.prompt_tokens
        totals.prompt_pairs += amounts.prompt_pairs
        totals.sequences += amounts.sequences
        totals.context_tokens += amounts.context_tokens

    def to_pb(self) -> worker_pb2.StepTotals:
        """Return a copy of the sums."""
        totals = worker_pb2.StepTotals()
        totals.CopyFrom(self._totals)
        return totals
