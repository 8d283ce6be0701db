"""/v1/chat/completions: the request, and how its answers look."""

from collections.abc import Sequence
from typing import Annotated

import pydantic
from pydantic import JsonValue

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.http.answer import Json
from cluster.gateway.http.base import Only
from cluster.gateway.http.fields import Count, SamplingFields, TopLogprobs
from cluster.gateway.http.logprobs import chat_logprobs
from cluster.gateway.http.messages import ChatFields, Messages
from cluster.gateway.parsing.interface import CallPiece
from cluster.gateway.progress import Delta
from common.text import Text


class ChatRequest(SamplingFields, ChatFields):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Count | None = None
    """Most tokens of the answer; up to the context window unless given."""
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include_reasoning: bool | None = None
    """False: what the model thinks before it answers is left out."""

    # Not supported.
    functions: Annotated[JsonValue, Only([])] = None
    function_call: Annotated[JsonValue, Only("none", "auto")] = None
    modalities: Annotated[JsonValue, Only(["text"])] = None
    audio: Annotated[JsonValue, Only()] = None
    web_search_options: Annotated[JsonValue, Only()] = None
    verbosity: Annotated[JsonValue, Only("medium")] = None
    add_special_tokens: Annotated[JsonValue, Only(False)] = None
    documents: Annotated[JsonValue, Only([])] = None
    mm_processor_kwargs: Annotated[JsonValue, Only({})] = None
    thinking_token_budget: Annotated[JsonValue, Only()] = None
    echo: Annotated[JsonValue, Only(False)] = None
    best_of: Annotated[JsonValue, Only(1)] = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only when logprobs is true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one")
        return self

    def to_pb(self) -> inference_pb2.GenerateRequest:
        """Return the request to the cluster."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        made = inference_pb2.GenerateRequest(
            model=self.model,
            chat=inference_pb2.ChatMessages(messages=[message.to_pb() for message in self.messages]),
            sampling=self.sampling(self.max_completion_tokens or self.max_tokens, logprobs),
            n=self.num_choices,
            tools=self.tools_to_pb(),
            tool_choice=self.choice_to_pb(),
            single_tool_call=self.parallel_tool_calls is False,
            template_arguments=self.template_arguments(),
        )
        self.set_text_options(made.text_options)
        return self.completed(made)


class ChatForm:
    """How the answers look."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    has_one_prompt = True

    def __init__(self, request_id: str, asked: ChatRequest, text: Text) -> None:
        self.answer_id = f"chatcmpl-{request_id}"
        self._text = text
        self._has_logprobs = bool(asked.logprobs)
        self._shows_reasoning = asked.include_reasoning is not False
        self._as_ids = bool(asked.return_tokens_as_token_ids)

    def first(self, index: int) -> Json:
        """Return the event that says who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, index: int, delta: Delta) -> Json:
        """Return a choice's fields in an event."""
        made: Json = {}
        if delta.reasoning and self._shows_reasoning:
            made |= _thought(delta.reasoning)
        if delta.calls:
            made["tool_calls"] = [_call_piece(piece) for piece in delta.calls]
        if delta.text or (delta.logprobs and not made):
            made["content"] = delta.text
        return {"index": index, "delta": made, "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None}

    def whole(self, index: int, said: Delta) -> Json:
        """Return a choice's fields in an answer in one piece."""
        message: Json = {"role": "assistant", "content": said.text, "refusal": None}
        if said.reasoning and self._shows_reasoning:
            message |= _thought(said.reasoning)
        if said.calls:
            message["tool_calls"] = _whole_calls(said.calls)
        if len(message) > 3:
            message["content"] = said.text or None
        return {"index": index, "message": message, "logprobs": self._logprobs(said.logprobs)}

    def _logprobs(self, tokens: Sequence[common_pb2.SampledToken]) -> Json | None:
        return chat_logprobs(self._text, tokens, self._as_ids) if self._has_logprobs else None


def _thought(text: str) -> Json:
    """Return it by both of its names: vLLM's newer and the one that most clients know."""
    return {"reasoning_content": text, "reasoning": text}


def _call_piece(piece: CallPiece) -> Json:
    function = {"arguments": piece.arguments}
    if not piece.name:
        return {"index": piece.index, "function": function}
    return {
        "index": piece.index,
        "id": piece.call_id,
        "type": "function",
        "function": {"name": piece.name, **function},
    }


def _whole_calls(pieces: Sequence[CallPiece]) -> list[Json]:
    calls: list[Json] = []
    for piece in pieces:
        if piece.name:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    return calls
