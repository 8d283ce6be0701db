"""/v1/chat/completions: the request, and how its answers look."""

from collections.abc import Sequence
from typing import Annotated, Literal

import pydantic
from pydantic import Field, JsonValue

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.http.answer import Json
from cluster.gateway.http.base import Fields, Ignored, Only
from cluster.gateway.http.fields import Count, SamplingFields, TopLogprobs
from cluster.gateway.http.logprobs import chat_logprobs
from cluster.gateway.request import MESSAGES_MAX
from common.text import Text

_PARTS_MAX = 1024


class TextPart(Fields):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """`developer` is read as `system`."""
    content: str | Annotated[list[TextPart], Field(max_length=_PARTS_MAX, fail_fast=True)] | None = None
    """Text, or pieces of text that are joined by line ends."""
    name: Ignored = None
    refusal: Annotated[JsonValue, Only()] = None
    audio: Annotated[JsonValue, Only()] = None
    tool_calls: Annotated[JsonValue, Only([])] = None
    tool_call_id: Annotated[JsonValue, Only()] = None
    function_call: Annotated[JsonValue, Only()] = None
    reasoning: Ignored = None
    reasoning_content: Ignored = None
    annotations: Ignored = None

    def to_pb(self) -> inference_pb2.ChatMessage:
        """Return the message as the gateway's core takes it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return inference_pb2.ChatMessage(role="system" if self.role == "developer" else self.role, content=text)


class ChatRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    max_tokens: Count | None = None
    """Most tokens of the answer; up to the context window unless given."""
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    # Not supported.
    tools: Annotated[JsonValue, Only([])] = None
    tool_choice: Annotated[JsonValue, Only("none", "auto")] = None
    parallel_tool_calls: Ignored = None
    functions: Annotated[JsonValue, Only([])] = None
    function_call: Annotated[JsonValue, Only("none", "auto")] = None
    modalities: Annotated[JsonValue, Only(["text"])] = None
    audio: Annotated[JsonValue, Only()] = None
    web_search_options: Annotated[JsonValue, Only()] = None
    reasoning_effort: Annotated[JsonValue, Only("none")] = None
    verbosity: Annotated[JsonValue, Only("medium")] = None
    add_generation_prompt: Annotated[JsonValue, Only(True)] = None
    continue_final_message: Annotated[JsonValue, Only(False)] = None
    add_special_tokens: Annotated[JsonValue, Only(False)] = None
    chat_template: Annotated[JsonValue, Only()] = None
    chat_template_kwargs: Annotated[JsonValue, Only({})] = None
    documents: Annotated[JsonValue, Only()] = None
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
        )
        return self.set_level(made)


class ChatForm:
    """How the answers look."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, request_id: str, asked: ChatRequest, text: Text) -> None:
        self.answer_id = f"chatcmpl-{request_id}"
        self._text = text
        self._has_logprobs = bool(asked.logprobs)

    def first(self, index: int) -> Json:
        """Return the event that says who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, index: int, text: str, tokens: Sequence[common_pb2.SampledToken]) -> Json:
        """Return a choice's fields in an event."""
        delta = {"content": text} if text or tokens else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens) if tokens else None}

    def whole(self, index: int, text: str, tokens: Sequence[common_pb2.SampledToken]) -> Json:
        """Return a choice's fields in an answer in one piece."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[common_pb2.SampledToken]) -> Json | None:
        return chat_logprobs(self._text, tokens) if self._has_logprobs else None
