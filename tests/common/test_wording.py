"""What is wrong with a field is said in plain words, whoever checked it."""

from typing import Annotated, Literal

import pydantic
import pytest
from pydantic import BaseModel, Field

from common.wording import sentence


class _Cat(BaseModel):
    kind: Literal["cat"]


class _Dog(BaseModel):
    kind: Literal["dog"]


class _Body(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, Field(min_length=1, max_length=3)] = "x"
    code: Annotated[str, Field(pattern="^[a-z]+$")] = "x"
    count: Annotated[int, Field(ge=1, lt=2**63)] = 1
    share: Annotated[float, Field(gt=0, le=0.5)] = 0.5
    names: Annotated[list[str], Field(min_length=2)] = ["x", "y"]
    is_on: bool = True
    colour: Literal["red", "green"] = "red"
    pet: Annotated[_Cat | _Dog, Field(discriminator="kind")] | None = None

    @pydantic.field_validator("code")
    @classmethod
    def _check(cls, code: str) -> str:
        if code == "no":
            raise ValueError("no is no code")
        return code


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": 5}, "text must be text"),
        ({"text": ""}, "text must have at least 1 character"),
        ({"text": "abcd"}, "text must have at most 3 characters"),
        ({"code": "A"}, "code must match ^[a-z]+$"),
        ({"code": "no"}, "code: no is no code"),
        ({"count": "1"}, "count must be an integer"),
        ({"count": 0}, "count must be at least 1"),
        ({"count": 2**63}, "count must be below 9223372036854775808"),
        ({"share": 0}, "share must be above 0"),
        ({"share": 1}, "share must be at most 0.5"),
        ({"names": {}}, "names must be a list"),
        ({"names": ["x"]}, "names must have at least 2 items, got 1"),
        ({"is_on": 1}, "is_on must be true or false"),
        ({"colour": "blue"}, "colour must be 'red' or 'green'"),
        ({"pet": 5}, "pet must be an object"),
        ({"pet": {}}, "pet is missing"),
        ({"pet": {"kind": "cow"}}, "pet must be 'cat' or 'dog'"),
        ({"size": 1}, "size is an unknown field"),
    ],
    ids=str,
)
def test_words_name_what_a_value_must_be(given: dict[str, object], words: str) -> None:
    with pytest.raises(pydantic.ValidationError) as raised:
        _Body.model_validate(given)

    [error] = raised.value.errors()
    assert sentence(str(error["loc"][0]), error) == words
