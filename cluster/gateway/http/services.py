"""The small endpoints: models, tokenize, detokenize. Health, readiness and metrics are in app.py."""

import time
from typing import Annotated, Any

import pydantic
from pydantic import Field

from baton_pb.v1 import inference_pb2
from cluster.gateway.chat import check_chat
from cluster.gateway.generate import Generator
from cluster.gateway.http.base import Fields
from cluster.gateway.http.fields import TokenId
from cluster.gateway.http.messages import ChatFields, Messages
from cluster.gateway.permissions import may_use
from cluster.gateway.request import TextPrompt, check_text, check_told
from cluster.gateway.tokenizing import Tokenizing
from cluster.tenants.callers import CALLER
from common.text import Text


class TokenizeRequest(ChatFields):
    """The body of /tokenize: a prompt or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    """Of a prompt: add what the tokenizer adds by itself. A conversation's template writes them in any case."""
    return_token_strs: bool | None = None
    """Also return each token's text."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        return self


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str = ""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class TextService:
    """Text <-> ids, and what is served. Owned by the gateway's loop."""

    def __init__(self, generator: Generator, tokenizing: Tokenizing, text: Text) -> None:
        self._generator = generator
        self._tokenizing = tokenizing
        self._text = text
        self._created = int(time.time())

    async def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        """Return the ids of a prompt or a conversation."""
        limits = self._generator.limits()
        self._generator.check_model(asked.model)
        if asked.messages is not None:
            chat = inference_pb2.ChatMessages(messages=[message.to_pb() for message in asked.messages])
            options = inference_pb2.TextOptions()
            asked.set_text_options(options)
            prompt = check_chat(chat, asked.tools_to_pb(), asked.template_arguments(), options, limits)
            token_ids = await self._tokenizing.token_ids(prompt)
        else:
            text = check_text(asked.prompt or "", limits).text
            token_ids = await self._tokenizing.token_ids(TextPrompt(text, asked.add_special_tokens))
        if asked.return_token_strs:
            check_told("tokens", token_ids, limits)
        texts = [self._text.token(token_id) for token_id in token_ids] if asked.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": limits.context_tokens,
            "tokens": list(token_ids),
            "token_strs": texts,
        }

    async def detokenize(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of ids, special tokens included."""
        limits = self._generator.limits()
        self._generator.check_model(asked.model)
        check_told("tokens", asked.tokens, limits)
        return {"prompt": self._text.decode(asked.tokens, skip_special_tokens=False)}

    def models(self) -> dict[str, Any]:
        """Return the list with the one model, if the caller may use it."""
        is_theirs = may_use(self._generator.limits().model_id, CALLER.get())
        return {"object": "list", "data": [self.model("")] if is_theirs else []}

    def model(self, model_id: str) -> dict[str, Any]:
        """Return the served model.

        Raises:
            NotFoundError: that is not what is served.
        """
        self._generator.check_model(model_id)
        limits = self._generator.limits()
        return {
            "id": limits.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": limits.model_id,
            "parent": None,
            "max_model_len": limits.context_tokens,
        }
