"""What goes into a step and what comes out of it: the words that loops, schedulers, runner and sampler share."""

from collections.abc import Callable
from typing import NamedTuple

from baton_pb.v1 import common_pb2
from common.errors import BatonError
from engine.sequence import Sequence


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence after its num_computed; one for a decode."""

    sequence: Sequence
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk ends with the sequence's last token, so that a token is sampled after it."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.token_ids)


class TokenOutput(NamedTuple):
    """One sampled token. `logprob` and `top` (token id, logprob; most likely first) are set when asked for."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]
    error: BatonError | None = None
    """No token could be chosen, and the sequence must end with this; the rest means nothing."""

    def to_pb(self) -> common_pb2.SampledToken:
        """Encode it for a message."""
        token = common_pb2.SampledToken(token_id=self.token_id, logprob=self.logprob)
        for token_id, logprob in self.top:
            token.top.add(token_id=token_id, logprob=logprob)
        return token


class LayerWatch(NamedTuple):
    """Who watches a running step: `reached(n)` follows as soon as the KV of its first n layers is final.

    Called on the thread that runs the step, once for each mark, and must neither block nor raise.
    """

    marks: tuple[int, ...]
    """Numbers of layers, ascending; each at least 1 and less than the model's."""
    reached: Callable[[int], object]


class Limits(NamedTuple):
    """What bounds a sequence on this engine."""

    context_tokens: int
    vocab_tokens: int
    eos_token_ids: frozenset[int]
