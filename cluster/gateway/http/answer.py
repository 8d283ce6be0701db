"""An answer to a chat or a completion, in one piece or as a stream. What the two do differently is their `Form`."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.choices import Piece, Streams, pieces_of
from cluster.gateway.http.exchange import Exchange
from cluster.gateway.http.fields import SamplingFields
from cluster.gateway.progress import Delta

Json = dict[str, Any]
_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "abort",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class Form(Protocol):
    """How one kind of answer looks. Made for one request."""

    answer_id: str
    whole_object: str
    """The value of `object` in an answer in one piece."""
    event_object: str
    """And in an event."""
    has_one_prompt: bool
    """Whether all choices have the same."""

    def first(self, index: int) -> Json | None:
        """Return what a choice's stream begins with, before any token."""
        ...

    def part(self, index: int, delta: Delta) -> Json:
        """Return a choice's fields in an event."""
        ...

    def whole(self, index: int, said: Delta) -> Json:
        """Return a choice's fields in an answer in one piece: all its deltas together."""
        ...


@dataclass(slots=True)
class _Choice:
    """What a choice has so far."""

    deltas: list[Delta] = field(default_factory=list)
    """All of them, if they are to be told together."""
    num_prompt_tokens: int = 0
    prompt: Sequence[int] = ()
    num_output_tokens: int = 0
    finished: inference_pb2.Finished | None = None
    has_begun: bool = False

    def take(self, piece: Piece, keep: bool) -> None:
        delta = piece.delta
        self.num_prompt_tokens = delta.num_prompt_tokens or self.num_prompt_tokens
        self.prompt = delta.prompt or self.prompt
        self.num_output_tokens += len(delta.token_ids)
        if keep:
            self.deltas.append(delta)
        if delta.finished is not None:
            self.finished = delta.finished
            self.num_prompt_tokens = delta.finished.usage.prompt_tokens

    def said(self) -> Delta:
        return Delta(
            "".join(delta.text for delta in self.deltas),
            [token_id for delta in self.deltas for token_id in delta.token_ids],
            logprobs=[token for delta in self.deltas for token in delta.logprobs],
            reasoning="".join(delta.reasoning for delta in self.deltas),
            calls=[piece for delta in self.deltas for piece in delta.calls],
        )


class Answer:
    """Serves one request: reads its choices and writes to its client. Owned by the request's task."""

    def __init__(self, exchange: Exchange, asked: SamplingFields, form: Form, model_id: str) -> None:
        self._exchange = exchange
        self._asked = asked
        self._form = form
        self._model_id = model_id
        self._created = int(time.time())
        self._choices: list[_Choice] = []
        self._shows_ids = bool(asked.return_token_ids)
        self._wants_timing = asked.timing or exchange.headers.get("x-baton-timing", "") in ("1", "true")

    async def serve(self, streams: Streams) -> None:
        """Run all choices and answer.

        Args:
            streams: one for each choice, in order; those of one prompt are neighbours.

        Raises:
            BatonError: what ended a choice, or that the client left; the answer may have begun.
        """
        self._choices = [_Choice() for _ in streams]
        is_stream = bool(self._asked.stream)
        async with self._exchange.attended(is_stream), pieces_of(streams) as pieces:
            await (self._stream(pieces) if is_stream else self._collect(pieces))
        if is_stream:
            await self._exchange.end(*self._last_events())
        else:
            await self._exchange.reply_json(200, self._whole())

    async def _collect(self, pieces: AsyncIterator[Piece]) -> None:
        async for piece in pieces:
            self._choices[piece.index].take(piece, keep=True)

    async def _stream(self, pieces: AsyncIterator[Piece]) -> None:
        async for piece in pieces:
            choice = self._choices[piece.index]
            choice.take(piece, keep=False)
            events = self._events(piece, choice)
            if events:
                await self._exchange.events(*events)

    def _last_events(self) -> list[Json]:
        """Return what follows when all choices have ended."""
        if not self._asked.includes_usage:
            return []
        return [{**self._head(self._form.event_object), "choices": [], "usage": self._usage()}]

    def _events(self, piece: Piece, choice: _Choice) -> list[Json]:
        """Return the events of a piece. Tokens without text yet are not worth one, but the first is told at once."""
        events: list[Json] = []
        delta = piece.delta
        if not choice.has_begun and (first := self._form.first(piece.index)) is not None:
            events.append(self._event({**first, "finish_reason": None}))
        has_text = delta.text or delta.reasoning or delta.calls or delta.logprobs
        if has_text or delta.finished is not None or (self._shows_ids and delta.token_ids):
            part = self._form.part(piece.index, delta)
            event = self._event({**part, **_ending(delta.finished)})
            if self._wants_timing and delta.finished is not None:
                event["timing"] = timing_of(delta.finished)
            events.append(event)
        if self._shows_ids and events:
            events[-1]["choices"][0]["token_ids"] = list(delta.token_ids)
            if not choice.has_begun:
                self._show_prompt(events[0], events[0]["choices"][0], choice)
        choice.has_begun = True
        return events

    def _show_prompt(self, answer: Json, shown: Json, choice: _Choice) -> None:
        """Add the prompt's ids where vLLM has them: a chat has one prompt, completions have several."""
        (answer if self._form.has_one_prompt else shown)["prompt_token_ids"] = list(choice.prompt)

    def _event(self, choice: Json) -> Json:
        event = {**self._head(self._form.event_object), "choices": [choice]}
        if self._asked.shows_usage:
            event["usage"] = self._usage()
        elif self._asked.includes_usage:
            event["usage"] = None
        return event

    def _whole(self) -> Json:
        choices = []
        for index, choice in enumerate(self._choices):
            said = choice.said()
            choices.append({**self._form.whole(index, said), **_ending(choice.finished)})
            if self._shows_ids:
                choices[-1]["token_ids"] = said.token_ids
            if self._wants_timing and len(self._choices) > 1 and choice.finished is not None:
                choices[-1]["timing"] = timing_of(choice.finished)
        answer = {**self._head(self._form.whole_object), "choices": choices, "usage": self._usage()}
        if self._shows_ids:
            for shown, choice in zip(choices, self._choices, strict=True):
                self._show_prompt(answer, shown, choice)
        first = self._choices[0].finished
        if self._wants_timing and first is not None:
            answer["timing"] = timing_of(first)
        return answer

    def _head(self, kind: str) -> Json:
        return {"id": self._form.answer_id, "object": kind, "created": self._created, "model": self._model_id}

    def _usage(self) -> Json:
        """Return the sum over choices; a prompt counts once however many choices it has."""
        per_prompt = self._asked.num_choices
        prompts = [self._choices[i : i + per_prompt] for i in range(0, len(self._choices), per_prompt)]
        prompt = sum(max(choice.num_prompt_tokens for choice in choices) for choices in prompts)
        output = sum(choice.num_output_tokens for choice in self._choices)
        cached = sum(min(_cached(choice) for choice in choices) for choices in prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(map(_reasoning, self._choices))},
            **costs_of([choice.finished.usage for choice in self._choices if choice.finished is not None]),
        }


def costs_of(usages: Sequence[common_pb2.Usage]) -> Json:
    """Return what finished choices used of devices, in seconds, and their cost where there are prices."""
    if not usages:
        return {}
    seconds = {
        "prefill": sum(usage.prefill_device_s for usage in usages),
        "decode": sum(usage.decode_device_s for usage in usages),
    }
    costs = [usage for usage in usages if usage.HasField("cost")]
    if not costs:
        return {"device_seconds": seconds}
    cost = {"amount": sum(usage.cost for usage in costs), "currency": costs[0].currency}
    return {"device_seconds": seconds, "cost": cost}


def timing_of(finished: inference_pb2.Finished) -> Json:
    """Return the parts of a request's time, in seconds, and who served it."""
    timing, placement = finished.timing, finished.placement
    return {
        "ttft_s": timing.ttft_s,
        "queue_s": timing.queue_s,
        "prefill_s": timing.prefill_s,
        "transfer_exposed_s": timing.transfer_exposed_s,
        "first_decode_s": timing.first_decode_s,
        "tpot_s": timing.tpot_s if timing.HasField("tpot_s") else None,
        "total_s": timing.total_s,
        "placement": {
            "prefill_worker_id": placement.prefill_worker_id if placement.HasField("prefill_worker_id") else None,
            "decode_worker_id": placement.decode_worker_id,
            "transport": placement.transport,
            "reason": placement.reason,
        },
    }


def _cached(choice: _Choice) -> int:
    return 0 if choice.finished is None else choice.finished.usage.cached_tokens


def _reasoning(choice: _Choice) -> int:
    return 0 if choice.finished is None else choice.finished.usage.reasoning_tokens


def _ending(finished: inference_pb2.Finished | None) -> Mapping[str, Any]:
    if finished is None:
        return {"finish_reason": None}
    stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
    return {"finish_reason": _REASONS.get(finished.reason, "stop"), "stop_reason": finished.stop or stop_token_id}
