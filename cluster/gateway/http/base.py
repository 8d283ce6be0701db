"""What all request bodies are made of: exact JSON types, and fields that are known but ignored or refused."""

from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import CoreSchema, core_schema

Ignored = Annotated[JsonValue, Field(description="Accepted and ignored: it has no effect on the answer.")]


class Fields(BaseModel):
    """Base of all request bodies: exact JSON types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Only:
    """Marks a field that we know and do not support: null is accepted, and values that change nothing."""

    def __init__(self, *neutral: JsonValue) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self._neutral], "description": "Not supported; accepted when it changes nothing."}

    def _check(self, value: JsonValue) -> JsonValue:
        if value is not None and not any(value == one and type(value) is type(one) for one in self._neutral):
            allowed = f" (only {' or '.join(map(_shown, self._neutral))} may be given)" if self._neutral else ""
            raise ValueError(f"not supported here{allowed}")
        return value


def _shown(value: JsonValue) -> str:
    return str(pydantic.TypeAdapter[JsonValue](JsonValue).dump_json(value), "utf-8")
