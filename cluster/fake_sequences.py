"""What a fake worker produces: sequences whose tokens come from a script, and one gateway's outputs."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from baton_pb.v1 import common_pb2, worker_pb2

CACHED_TOKENS = 2
"""What it says of every sequence."""
TRANSPORT = "fake"

Script = Callable[[Sequence[int]], Iterator[int]]
"""Prompt -> the tokens that follow it, endless."""


def echo(prompt: Sequence[int]) -> Iterator[int]:
    """Repeat the prompt for ever."""
    return cycle(prompt)


@dataclass(slots=True, eq=False)
class FakeSequence:
    """One sequence, whose tokens come from a script."""

    request_id: str
    tokens: Iterator[int]
    sampling: common_pb2.SamplingParams
    eos_token_ids: frozenset[int]
    count: int = 0
    waits_for_prefill: bool = False

    def next_output(self) -> worker_pb2.SequenceOutput:
        """Return the next token, with the end if this is it."""
        token_id = next(self.tokens)
        self.count += 1
        output = worker_pb2.SequenceOutput(request_id=self.request_id, tokens=[self.sampled(token_id)])
        if token_id in self.sampling.stop_token_ids or token_id in self.eos_token_ids:
            output.finished.CopyFrom(summary(common_pb2.FINISH_REASON_STOP))
        elif self.count == self.sampling.max_tokens:
            output.finished.CopyFrom(summary(common_pb2.FINISH_REASON_LENGTH))
        return output

    def sampled(self, token_id: int) -> common_pb2.SampledToken:
        """Return a token with the logprobs that were asked for."""
        if not self.sampling.HasField("logprobs"):
            return common_pb2.SampledToken(token_id=token_id)
        top = [common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)] * self.sampling.logprobs
        return common_pb2.SampledToken(token_id=token_id, logprob=-0.5, top=top)


def summary(reason: "common_pb2.FinishReason.ValueType") -> worker_pb2.SequenceFinished:
    """Return how a sequence ended."""
    return worker_pb2.SequenceFinished(reason=reason, cached_tokens=CACHED_TOKENS, prefill_s=1e-6, transport=TRANSPORT)


@dataclass(slots=True, eq=False)
class FakeSession:
    """What one gateway has running, and what it is owed."""

    sequences: dict[str, FakeSequence] = field(default_factory=dict)
    eager: dict[str, FakeSequence] = field(default_factory=dict)
    """Those that get a token without waiting for a step; they may wait for their prefill."""
    outputs: list[worker_pb2.SequenceOutput] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_decoding(self) -> bool:
        """Whether a step would give tokens."""
        return any(not sequence.waits_for_prefill for sequence in self.sequences.values())

    def add(self, sequence: FakeSequence) -> None:
        """Begin a sequence: its first token waits for no step."""
        self.sequences[sequence.request_id] = self.eager[sequence.request_id] = sequence
        self.changed.set()

    def remove(self, request_id: str) -> bool:
        """End a sequence; False if there is none."""
        self.eager.pop(request_id, None)
        return self.sequences.pop(request_id, None) is not None

    def hurry(self) -> None:
        """Give each sequence a token without waiting for a step."""
        self.eager.update(self.sequences)
        self.changed.set()

    def step(self, is_due: bool) -> list[worker_pb2.SequenceOutput]:
        """Return a token of each sequence that waits for no step; when one is due, of all that are prefilled."""
        asked = self.sequences if is_due else self.eager
        ready = [sequence for sequence in asked.values() if not sequence.waits_for_prefill]
        outputs = [sequence.next_output() for sequence in ready]
        for output in outputs:
            self.eager.pop(output.request_id, None)
            if output.HasField("finished"):
                del self.sequences[output.request_id]
        return outputs

    def emit(self, output: worker_pb2.SequenceOutput) -> None:
        """Send an output before the next step."""
        self.outputs.append(output)
        self.changed.set()
