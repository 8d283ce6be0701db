"""What one request has produced so far: its tokens, its text, its times. Survives a change of workers."""

from collections.abc import Sequence
from typing import NamedTuple

from baton_pb.v1 import common_pb2, inference_pb2, router_pb2, worker_pb2
from cluster.gateway.parsing.formats import Reading
from cluster.gateway.parsing.interface import CallPiece, Parsed
from cluster.gateway.request import Request
from common.clock import Clock
from common.text import Text


class Delta(NamedTuple):
    """What a client gets next."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[common_pb2.SampledToken] = ()
    """One for each token id, when asked for."""
    finished: inference_pb2.Finished | None = None
    """Set in the last one only."""
    num_prompt_tokens: int = 0
    """0: as before."""
    reasoning: str = ""
    """What the model thinks before it answers; no part of the text."""
    calls: Sequence[CallPiece] = ()
    """What became certain of calls of tools; no part of the text."""
    prompt: Sequence[int] = ()
    """Its ids; empty: as before."""


class Progress:
    """Owned by the task that serves the request."""

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int],
        received_s: float,
        text: Text,
        eos: frozenset[int],
        clock: Clock,
        reading: Reading,
    ) -> None:
        """Begin.

        Args:
            request: the request.
            prompt: its token ids.
            received_s: when it arrived, by `clock`.
            text: the model's.
            eos: the model's stop tokens.
            clock: for the times.
            reading: how calls and thinking are told from text.
        """
        self.prompt = prompt
        self.token_ids: list[int] = []
        """The output."""
        self._text = text
        shown = text.special_ids if request.text.show_special_tokens else reading.shown
        self._detokenizer = text.detokenizer(request.stop, shown, request.text.keep_stop)
        self._keeps_stop = request.text.keep_stop
        self._reading = reading
        self._num_reasoning_tokens = 0
        self._has_calls = False
        self._reads_one_by_one = bool(request.stop) or reading.parser is not None
        self._wants_logprobs = request.sampling.HasField("logprobs")
        self._asked_ids = frozenset(request.sampling.stop_token_ids)
        self._stop_ids = self._asked_ids if request.sampling.ignore_eos else self._asked_ids | eos
        self._withheld: int | None = None
        self._clock = clock
        self._received_s = received_s
        self._first_s: float | None = None
        self._last_s = received_s

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared: nothing more is wanted from the worker."""
        return self._detokenizer.stopped is not None

    def take(self, tokens: Sequence[common_pb2.SampledToken]) -> Delta:
        """Add tokens; those after a stop string are dropped."""
        # One by one only where a token may change what the ones after it mean: those of one message share the work.
        steps = [[token] for token in tokens] if self._reads_one_by_one else [tokens]
        parsed, taken = Parsed(), list[common_pb2.SampledToken]()
        for step in steps:
            if self._reading.thinking is not None and self._reading.thinking.is_thinking:
                self._num_reasoning_tokens += len(step)
            if text := self._push([token.token_id for token in step]):
                parsed += self._parse(text)
            taken += step
            if self.stopped:
                break
        if taken:
            self._last_s = self._clock.now()
            if self._first_s is None:
                self._first_s = self._last_s
        token_ids = [token.token_id for token in taken]
        self.token_ids += token_ids
        logprobs = self._with_texts(taken) if self._wants_logprobs else ()
        return Delta(
            parsed.text, token_ids, logprobs, None, len(self.prompt), parsed.reasoning, parsed.calls, self.prompt
        )

    def finish(self, summary: worker_pb2.SequenceFinished, placement: router_pb2.WorkerPlacement, last: Delta) -> Delta:
        """End the request.

        Args:
            summary: the worker's.
            placement: of the last attempt.
            last: what was taken and not handed out yet.

        Returns:
            The last delta, with the text that was held back.
        """
        text, reason = "", summary.reason
        if not self.stopped:
            if self._withheld is not None and (self._keeps_stop or reason != common_pb2.FINISH_REASON_STOP):
                text += self._detokenizer.push([self._withheld])  # it did not end the sequence: it is text
            text += self._detokenizer.finish()
        if self.stopped:
            reason = common_pb2.FINISH_REASON_STOP
        has_ended = reason == common_pb2.FINISH_REASON_STOP and not self.stopped
        stop_token_id = self._withheld if has_ended and self._withheld in self._asked_ids else None
        parsed = Parsed(last.text, last.reasoning, tuple(last.calls)) + self._parse(text, is_last=True)
        if self._has_calls and reason == common_pb2.FINISH_REASON_STOP:
            reason = common_pb2.FINISH_REASON_TOOL_CALLS
        finished = inference_pb2.Finished(
            reason=reason,
            stop=self._detokenizer.stopped or "",
            stop_token_id=stop_token_id,
            usage=common_pb2.Usage(
                prompt_tokens=len(self.prompt),
                output_tokens=len(self.token_ids),
                # A sequence that moved may have found its own output cached.
                cached_tokens=min(summary.cached_tokens, len(self.prompt)),
                reasoning_tokens=self._num_reasoning_tokens,
                prefill_device_s=summary.prefill_device_s,
                decode_device_s=summary.decode_device_s,
            ),
            timing=self._timing(summary),
            placement=common_pb2.Placement(
                prefill_worker_id=placement.prefill.worker_id if placement.HasField("prefill") else None,
                decode_worker_id=placement.decode_worker_id,
                transport=summary.transport or "local",
                reason=placement.reason,
            ),
        )
        return Delta(parsed.text, last.token_ids, last.logprobs, finished, 0, parsed.reasoning, parsed.calls)

    def _parse(self, text: str, is_last: bool = False) -> Parsed:
        parser = self._reading.parser
        if parser is None:
            return Parsed(text)
        parsed = parser.push(text) if text else Parsed()
        if is_last:
            parsed += parser.finish()
        self._has_calls = self._has_calls or bool(parsed.calls)
        return parsed

    def _push(self, token_ids: list[int]) -> str:
        """Return the text of tokens. A token that may end the sequence has text only if the sequence goes on."""
        if self._withheld is not None and token_ids:
            token_ids, self._withheld = [self._withheld, *token_ids], None
        if token_ids and token_ids[-1] in self._stop_ids:
            self._withheld = token_ids.pop()
        return self._detokenizer.push(token_ids)

    def _with_texts(self, tokens: Sequence[common_pb2.SampledToken]) -> Sequence[common_pb2.SampledToken]:
        for token in tokens:
            for alternative in token.top:
                alternative.text = self._text.token(alternative.token_id)
        return tokens

    def _timing(self, summary: worker_pb2.SequenceFinished) -> common_pb2.Timing:
        first_s = self._last_s if self._first_s is None else self._first_s
        ttft_s = first_s - self._received_s
        # Two clocks of two hosts: the part can seem larger than the whole by their drift.
        prefill_s = min(summary.prefill_s, ttft_s)
        later = len(self.token_ids) - 1
        return common_pb2.Timing(
            ttft_s=ttft_s,
            queue_s=ttft_s - prefill_s,
            prefill_s=prefill_s,
            transfer_exposed_s=summary.transfer_exposed_s,
            first_decode_s=summary.first_decode_s,
            tpot_s=(self._last_s - first_s) / later if later > 0 else None,
            total_s=self._last_s - self._received_s,
        )
