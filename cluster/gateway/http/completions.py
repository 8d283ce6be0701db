"""/v1/completions: the request, with its four kinds of prompt, and how its answers look."""

from collections.abc import Sequence
from typing import Annotated

import pydantic
from pydantic import Field, JsonValue

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.gateway.http.answer import Json
from cluster.gateway.http.base import Only
from cluster.gateway.http.fields import Count, SamplingFields, TokenId, TopLogprobs
from cluster.gateway.http.logprobs import completion_logprobs
from cluster.gateway.progress import Delta
from common.text import Text

MAX_TOKENS_DEFAULT = 16
"""OpenAI's."""
_PROMPTS_MAX = 2048

Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
OnePrompt = str | list[int]
_Batch = Field(min_length=1, max_length=_PROMPTS_MAX, fail_fast=True)


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | Ids | Annotated[list[str], _Batch] | Annotated[list[Ids], _Batch]
    """Text, or token ids; or a list of texts, or of lists of token ids."""
    max_tokens: Count | None = None
    """Most tokens of the answer; 16 unless given."""
    logprobs: TopLogprobs | None = None
    """Alternatives of each token; 0: the chosen token only."""
    echo: bool | None = None
    """Begin the text with the prompt. Not together with logprobs."""
    add_special_tokens: bool | None = None
    """False: the tokenizer adds none of its own to a text."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Not supported: only what n says anyway."""

    # Not supported.
    suffix: Annotated[JsonValue, Only("")] = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError("best_of is not supported here: leave it out or set it to n")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo together with logprobs is not supported here: the prompt has no logprobs")
        return self

    @property
    def prompts(self) -> Sequence[OnePrompt]:
        """The prompts, each text or token ids."""
        match self.prompt:
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]  # mypy does not narrow a list by its first item
            case list():
                return self.prompt  # type: ignore[return-value]  # as above
            case _:
                return [self.prompt]

    def to_pb(self, prompt: OnePrompt) -> inference_pb2.GenerateRequest:
        """Return the request to the cluster for one prompt."""
        made = inference_pb2.GenerateRequest(
            model=self.model,
            sampling=self.sampling(self.max_tokens or MAX_TOKENS_DEFAULT, self.logprobs),
            n=self.num_choices,
        )
        if isinstance(prompt, str):
            made.text = prompt
        else:
            made.token_ids.ids.extend(prompt)
        made.text_options.no_special_tokens = self.add_special_tokens is False
        return self.completed(made)


class CompletionForm:
    """How the answers look."""

    whole_object = "text_completion"
    event_object = "text_completion"
    has_one_prompt = False

    def __init__(self, request_id: str, asked: CompletionRequest, text: Text) -> None:
        self.answer_id = f"cmpl-{request_id}"
        self._text = text
        self._has_logprobs = asked.logprobs is not None
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        self._num_choices = asked.num_choices
        self._echoed = [_text_of(prompt, text) for prompt in asked.prompts] if asked.echo else None
        self._offsets: dict[int, int] = {}

    def first(self, index: int) -> Json | None:
        """Return the event with the prompt, if it is wanted."""
        if self._echoed is None:
            return None
        return {"index": index, "text": self._echoed[index // self._num_choices], "logprobs": None}

    def part(self, index: int, delta: Delta) -> Json:
        """Return a choice's fields in an event."""
        tokens = delta.logprobs
        return {"index": index, "text": delta.text, "logprobs": self._logprobs(index, tokens) if tokens else None}

    def whole(self, index: int, said: Delta) -> Json:
        """Return a choice's fields in an answer in one piece."""
        text = said.text
        if self._echoed is not None:
            text = self._echoed[index // self._num_choices] + text
        return {"index": index, "text": text, "logprobs": self._logprobs(index, said.logprobs)}

    def _logprobs(self, index: int, tokens: Sequence[common_pb2.SampledToken]) -> Json | None:
        if not self._has_logprobs:
            return None
        offset = self._offsets.get(index, 0)
        made = completion_logprobs(self._text, tokens, offset, self._as_ids)
        self._offsets[index] = offset + sum(len(self._text.token(token.token_id)) for token in tokens)
        return made


def _text_of(prompt: OnePrompt, text: Text) -> str:
    return prompt if isinstance(prompt, str) else text.decode(prompt, skip_special_tokens=False)
