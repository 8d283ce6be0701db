"""What the workers of a cluster must have in common, decided by the first of them that can be used."""

from collections.abc import Iterable

from cluster.router.worker import State, Worker, WorkerFacts
from common.errors import MismatchError


class Agreement:
    """Model, block layout and hashing of a cluster. Owned by the router."""

    def __init__(self) -> None:
        self.facts: WorkerFacts | None = None
        """Of the first worker that was ready; None while there is none that could be contradicted."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block; 1 while that is not known."""
        return 1 if self.facts is None else self.facts.block_tokens

    def check(self, facts: WorkerFacts) -> None:
        """Compare what a worker says of itself.

        Raises:
            MismatchError: it cannot be part of this cluster.
        """
        if self.facts is None:
            return
        for name, ours, theirs in (
            ("model id", self.facts.model_id, facts.model_id),
            ("block layout", self.facts.layout, facts.layout),
            ("probe hash", self.facts.hash_probe.hex(), facts.hash_probe.hex()),
        ):
            if ours != theirs:
                raise MismatchError(f"{name} is {theirs}, the cluster's is {ours}")

    def join(self, facts: WorkerFacts) -> None:
        """A worker that was compared can be used; the first one decides."""
        self.facts = self.facts or facts

    def forget_if_alone(self, workers: Iterable[Worker]) -> None:
        """When no worker is left that it could contradict, the next one decides what is true."""
        if not any(worker.state in (State.READY, State.DRAINING) for worker in workers):
            self.facts = None
