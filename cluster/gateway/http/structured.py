"""The fields that say what an answer must look like: OpenAI's `response_format`, and vLLM's names for the rest."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import Field, JsonValue

from baton_pb.v1 import common_pb2
from cluster.gateway.http.base import Fields, Ignored, Only
from common.errors import InvalidRequestError

Schema = dict[str, JsonValue]
_Texts = Annotated[list[str], Field(fail_fast=True)]
_NAMES = (
    (re.compile(r"^(tools\[\d+\])\."), r"\1.function."),
    (re.compile(r"^(messages\[\d+\]\.tool_calls\[\d+\])\.(?=name|arguments)"), r"\1.function."),
    (re.compile(r"^template_arguments\b"), "chat_template_kwargs"),
)
"""How the gateway's core calls fields, and how OpenAI does."""
_SCHEMA_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class JsonSchema(Fields):
    """A schema and its name."""

    name: Annotated[str, Field(pattern=_SCHEMA_NAME)]
    description: Ignored = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """Any object unless given."""
    strict: bool | None = None
    """The schema is obeyed in any case."""


class ResponseFormat(Fields):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and not with another")
        return self


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`: one of the forms."""

    # Named as in the API, whose names pydantic uses itself.
    json_: Annotated[str | Schema | None, Field(alias="json")] = None
    """A JSON schema."""
    regex: str | None = None
    choice: _Texts | None = None
    grammar: str | None = None
    """EBNF (GBNF) or Lark."""
    json_object: bool | None = None
    structural_tag: Annotated[JsonValue, Only()] = None
    disable_fallback: Ignored = None
    disable_any_whitespace: Ignored = None
    disable_additional_properties: Annotated[JsonValue, Only(False)] = None
    whitespace_pattern: Annotated[JsonValue, Only()] = None


class _Wanted(NamedTuple):
    """A form, and where the client wrote it."""

    path: str
    grammar: common_pb2.Grammar


class StructuredFields(Fields):
    """At most one of them may be given."""

    response_format: ResponseFormat | None = None
    """`json_schema` and `json_object` are obeyed token by token."""
    structured_outputs: StructuredOutputs | None = None
    """As in vLLM: `json`, `regex`, `choice` or `grammar`."""
    guided_json: str | Schema | None = None
    """vLLM's older name of structured_outputs.json."""
    guided_regex: str | None = None
    guided_choice: _Texts | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Ignored = None
    guided_whitespace_pattern: Annotated[JsonValue, Only()] = None

    @pydantic.model_validator(mode="after")
    def _check_forms(self) -> "StructuredFields":
        wanted = [one.path for one in self._wanted()]
        if len(wanted) > 1:
            raise ValueError(f"{wanted[0].partition('.')[0]} is one form, {wanted[1]} another: give one")
        return self

    def grammar(self) -> common_pb2.Grammar | None:
        """Return the form for the cluster."""
        return next((one.grammar for one in self._wanted()), None)

    @contextmanager
    def named_as_asked(self) -> Iterator[None]:
        """Let errors name the fields as the client wrote them."""
        try:
            yield
        except InvalidRequestError as error:
            message = error.message
            for one in self._wanted():
                message = re.sub(r"^grammar\b(\.[a-z_]+)?", one.path, message)
            for pattern, name in _NAMES:
                message = pattern.sub(name, message)
            if message == error.message:
                raise
            raise InvalidRequestError(message) from error

    def _wanted(self) -> Iterator[_Wanted]:
        if self.response_format is not None:
            yield from _of_response_format(self.response_format)
        outputs = self.structured_outputs or StructuredOutputs()
        for prefix, schema, regex, choice, grammar in (
            ("structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.grammar),
            ("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
        ):
            if schema is not None:
                yield _Wanted(f"{prefix}json", common_pb2.Grammar(json_schema=_text(schema)))
            if regex is not None:
                yield _Wanted(f"{prefix}regex", common_pb2.Grammar(regex=regex))
            if choice is not None:
                yield _Wanted(f"{prefix}choice", common_pb2.Grammar(choice=common_pb2.Choices(texts=choice)))
            if grammar is not None:
                yield _Wanted(f"{prefix}grammar", common_pb2.Grammar(grammar=grammar))
        if outputs.json_object:
            yield _Wanted("structured_outputs.json_object", _any_object())


def _of_response_format(wanted: ResponseFormat) -> Iterator[_Wanted]:
    if wanted.type == "json_object":
        yield _Wanted("response_format", _any_object())
    elif wanted.json_schema is not None:
        path, schema = "response_format.json_schema.schema", wanted.json_schema.schema_
        if schema is None:
            yield _Wanted(path, _any_object())
        else:
            yield _Wanted(path, common_pb2.Grammar(json_schema=_text(schema)))


def _any_object() -> common_pb2.Grammar:
    return common_pb2.Grammar(json_object=common_pb2.JsonObject())


def _text(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
