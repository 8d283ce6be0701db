"""A client's grammar becomes what workers obey, or is refused with the path of the part that cannot be obeyed."""

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest

from baton_pb.v1.common_pb2 import Choices, Grammar, JsonObject
from common.errors import InvalidRequestError
from common.grammar import CHOICES_MAX, Form, after_thinking, constraint_of, form_of, parser_limits
from common.tiny_text import write_tokenizer

BYTES_MAX = 65536
DEPTH_MAX = 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> llguidance.LLTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return llguidance.LLTokenizer(str(folder / "tokenizer.json"), eos_token=[0])


def _obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _schema(value: Any) -> Grammar:
    return Grammar(json_schema=json.dumps(value))


def _is_accepted(tokenizer: llguidance.LLTokenizer, form: Form, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, constraint_of(form), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


NODE = {"$defs": {"node": _obj(kids={"type": "array", "items": {"$ref": "#/$defs/node"}})}, "$ref": "#/$defs/node"}
CASES = [
    pytest.param(
        _schema(_obj(a={"type": "integer"})), ['{"a":1}', '{"a": 1}'], ['{"b":1}', "{}", '{\n"a": 1}', '{"a":  1}']
    ),
    pytest.param(_schema(NODE), ['{"kids": []}', '{"kids": [{"kids": []}]}'], ['{"kids": [1]}']),
    pytest.param(Grammar(json_object=JsonObject()), ['{"x": [1, {}]}', "{}"], ["[1]", "3"]),
    pytest.param(Grammar(regex=r"\d{2}-[a-z/]+"), ["12-a/b"], ["12", "x12-a", "12-a "]),
    pytest.param(Grammar(choice=Choices(texts=["yes", 'a "quoted" é\n'])), ["yes", 'a "quoted" é\n'], ["no", "yesyes"]),
    pytest.param(Grammar(grammar='root ::= "a" b\nb ::= [0-9]+'), ["a12"], ["a", "b1"]),
    pytest.param(Grammar(grammar='start: "a" B\nB: /[0-9]+/'), ["a12"], ["a", "b1"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_a_form_accepts_its_language_and_nothing_else(
    tokenizer: llguidance.LLTokenizer, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    form = form_of(grammar, BYTES_MAX, DEPTH_MAX)

    assert [_is_accepted(tokenizer, form, text) for text in good] == [True] * len(good)
    assert [_is_accepted(tokenizer, form, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_the_same_language_follows_thinking(
    tokenizer: llguidance.LLTokenizer, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    form = form_of(grammar, BYTES_MAX, DEPTH_MAX)
    optional = after_thinking(form, '"<think>"', '"</think>"', is_token=False, is_open=False)
    begun = after_thinking(form, '"<think>"', '"</think>"', is_token=False, is_open=True)

    for text in good:
        assert _is_accepted(tokenizer, optional, text)
        assert _is_accepted(tokenizer, optional, f"<think>\n{{ so }}\n</think>\n\n{text}")
        assert _is_accepted(tokenizer, begun, f"so </think>\n{text}")
        assert not _is_accepted(tokenizer, begun, text)
    for text in bad:
        assert not _is_accepted(tokenizer, optional, f"<think>so</think>{text}")


def test_the_search_for_what_is_wrong_ends_in_a_schema_of_thousands_of_parts() -> None:
    properties = {f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in range(900)}
    schema = {**_obj(**properties), "$defs": {f"d{number}": True for number in range(900)}}
    schema["properties"]["last"] = {"not": {}}

    with pytest.raises(InvalidRequestError, match=r"grammar.json_schema is not supported: Unimplemented keys"):
        form_of(_schema(schema), BYTES_MAX, DEPTH_MAX)


def _nested(levels: int) -> dict[str, Any]:
    return {"items": _nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(), "grammar has no form"),
        (
            _schema(_obj(a=_obj(b={"items": {"not": {}}}))),
            "grammar.json_schema.properties.a.properties.b.items.not is not",
        ),
        (_schema(_obj(x={"anyOf": [{"type": "string"}, {"type": "strin"}]})), "properties.x.anyOf[1] is not supported"),
        (_schema(_obj(x={"type": "string", "pattern": "(?=a)"})), "grammar.json_schema.properties.x is not supported"),
        (_schema({**NODE, "$defs": {"node": {"uniqueItems": True}}}), "json_schema.$defs.node.uniqueItems is not"),
        (_schema(_obj(x={"$ref": "#/$defs/gone"})), "properties.x is not supported: Pointer '/$defs/gone'"),
        (_schema(_obj(x={"$ref": "http://example.org/x"})), "properties.x is not supported: Resource"),
        (_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "grammar.json_schema is not supported: Unsat"),
        (_schema(3), "grammar.json_schema must be a JSON object, got int"),
        (_schema(_nested(DEPTH_MAX + 1)), f"grammar.json_schema must have at most {DEPTH_MAX} levels"),
        (Grammar(json_schema="{"), "grammar.json_schema is not JSON"),
        (Grammar(json_schema="[" * 60000), "grammar.json_schema is not JSON"),
        (Grammar(json_schema=" " * BYTES_MAX), f"grammar must have at most {BYTES_MAX} bytes"),
        (Grammar(regex="(?=x)"), "grammar.regex is not supported"),
        (Grammar(regex="(a"), "grammar.regex is not supported"),
        (Grammar(choice=Choices()), "grammar.choice must have 1 to"),
        (Grammar(choice=Choices(texts=["x"] * (CHOICES_MAX + 1))), "grammar.choice must have 1 to"),
        (Grammar(choice=Choices(texts=["x", ""])), "grammar.choice[1] is empty"),
        (Grammar(grammar="root ::= ((( 'a'"), "grammar.grammar is not"),
        (Grammar(grammar='start: "a" nobody'), "grammar.grammar is not supported"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_its_path(grammar: Grammar, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        form_of(grammar, BYTES_MAX, DEPTH_MAX)

    assert message in caught.value.message


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param(_schema({"type": "integer", "multipleOf": 99991}), id="large"),
        pytest.param(_schema({"anyOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), id="together"),
        pytest.param(_schema({"type": "number", "multipleOf": 99.991}), id="fraction"),
        pytest.param(Grammar(grammar='start: %json {"multipleOf": 1e999999999}'), id="exponent"),
        pytest.param(Grammar(grammar='start: %json {"multi\\u0070leOf": 99991}'), id="inside of Lark"),
        pytest.param(Grammar(grammar='start: %json  {"multipleOf": 99991, "multipleOf": 2}'), id="twice"),
    ],
)
def test_a_multiple_that_takes_seconds_to_compile_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar\.(json_schema|grammar's %json) has multipleOf"):
        form_of(grammar, BYTES_MAX, DEPTH_MAX)


@pytest.mark.parametrize("multiple", [0.01, 0.25, 60, 3600, 10_000, 1_000_000])
def test_common_multiples_are_obeyed(tokenizer: llguidance.LLTokenizer, multiple: float) -> None:
    form = form_of(_schema({"type": "number", "multipleOf": multiple}), BYTES_MAX, DEPTH_MAX)

    assert _is_accepted(tokenizer, form, str(multiple * 3))


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, ""),
        ({"$defs": {"a": _ref("b"), "b": _ref("a")}, "$ref": "#/$defs/a"}, ""),
        (_obj(x={"$ref": "#/properties/x"}), ".properties.x"),
        ({"type": "array", "prefixItems": [{"$ref": "#/prefixItems/0"}]}, ".prefixItems[0]"),
        ({"$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}, "type": "string"}, ".$defs.a/b c"),
    ],
    ids=["the whole", "two", "a property", "an item", "unused"],
)
def test_a_reference_that_leads_back_to_itself_is_refused(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        form_of(_schema(schema), BYTES_MAX, DEPTH_MAX)

    expected = f"grammar.json_schema{path}.$ref must lead to a schema, it leads back to itself"
    assert raised.value.message == expected


@pytest.mark.parametrize(
    "schema",
    [
        _obj(child={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        {"$defs": {"a": _ref("b"), "b": _obj(a={"type": "array", "items": _ref("a")})}, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}},
        _obj(a=_ref("x"), b=_ref("x")) | {"$defs": {"x": {"type": "integer"}}},
    ],
    ids=["property", "through two", "items", "used twice"],
)
def test_a_schema_may_refer_to_what_is_around_a_part(tokenizer: llguidance.LLTokenizer, schema: dict[str, Any]) -> None:
    form = form_of(_schema(schema), BYTES_MAX, DEPTH_MAX)

    assert not llguidance.LLMatcher(tokenizer, constraint_of(form), log_level=0, limits=parser_limits()).is_error()


def test_a_long_chain_of_references_is_followed_once() -> None:
    chain = {f"d{i}": _ref(f"d{i + 1}") for i in range(1500)} | {"d1500": {"type": "integer"}}

    form_of(_schema({"$defs": chain, "$ref": "#/$defs/d0"}), BYTES_MAX * 2, DEPTH_MAX)
