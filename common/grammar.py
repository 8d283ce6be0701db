"""What an output must look like, in one form for all workers: a client's Grammar -> a constraint, checked and bounded.

A constraint is a list of grammars in llguidance's JSON: the first is Lark text, which names the others as `@name`. The
workers compile it against their tokenizer (engine/grammar.py); here it is checked without one, so that a client hears
at once which part of its schema cannot be obeyed.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple
from urllib.parse import unquote

import llguidance
from llguidance import gbnf_to_lark
from pydantic_core import from_json

from baton_pb.v1 import common_pb2
from common.errors import InvalidRequestError

Json = dict[str, Any]

CHOICES_MAX = 2048
_TRIES_MAX = 256
"""Parts of a schema that are tried to find out which one is wrong; each takes up to a few milliseconds."""
_LEXER_STATES_MAX = 20_000
"""For each sequence, 1 to 2 KB each. JSON needs hundreds; a regular expression that needs more ends its request."""
_GRAMMAR_SYMBOLS_MAX = 200_000
_ROW_ITEMS_MAX = 4096
"""As many as CHOICES_MAX choices need, and as many again."""
_STEP_ITEMS_MAX = 5000
"""In the reckoning of one mask. Steps wait for it: `start: start start | /[a-z]/` took 0.25 s a token after 35 tokens
under the library's 50,000 and takes 3 ms before it ends under these, on two cores. 500 optional properties, 2,048
choices or 900 required properties stay below."""
_STEP_LEXER_FUEL = 50_000
"""In the reckoning of one mask, for states of the lexer: what texts in a grammar may begin alike. Masks of 1,500 such
that overlap took 45 to 190 ms under the library's 200,000 and take 12 ms before they end under these. 2,048 choices,
500 optional properties and the formats of JSON schemas stay below."""

_MULTIPLE_MAX = 10_000
"""Least common multiple of all multipleOf of a schema, powers of ten apart. A worker compiles one grammar after the
other, and takes 12 us for each remainder: 1.2 s for 99991, 20 minutes for 99999989."""

_MULTIPLE_DIGITS_MAX = 16

_JSON_IN_LARK = re.compile(r"%json\s*")
_UNKNOWN_KEY = re.compile(r'Unimplemented keys: \["([^"]*)"\]')


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar: Lark rules with a `start`, and the grammars that they name as `@name`."""

    lark: str
    nested: Mapping[str, Json] = field(default_factory=dict)
    """Each with `json_schema` or `lark_grammar`."""


def parser_limits() -> llguidance.LLParserLimits:
    """Return what bounds a grammar's time and memory, in compiling and for each token."""
    return llguidance.LLParserLimits(
        max_lexer_states=_LEXER_STATES_MAX,
        max_grammar_size=_GRAMMAR_SYMBOLS_MAX,
        max_items_in_row=_ROW_ITEMS_MAX,
        step_max_items=_STEP_ITEMS_MAX,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        verbose_errors=False,
    )


def form_of(grammar: common_pb2.Grammar, bytes_max: int, depth_max: int) -> Form:
    """Check a client's grammar and return it.

    Args:
        grammar: from the client.
        bytes_max: longest text that it may have.
        depth_max: levels that a schema may have.

    Raises:
        InvalidRequestError: too large, not valid, or with a part that cannot be obeyed; the message begins with the
            field's path.
    """
    if grammar.ByteSize() > bytes_max:
        raise InvalidRequestError(f"grammar must have at most {bytes_max} bytes, got {grammar.ByteSize()}")
    match grammar.WhichOneof("form"):
        case "json_object":
            return json_form({"type": "object"}, "grammar.json_object")
        case "json_schema":
            path = "grammar.json_schema"
            return json_form(parsed_schema(grammar.json_schema, path, depth_max), path)
        case "regex":
            return _checked(_lark_of(llguidance.LLMatcher.grammar_from_regex(grammar.regex)), "grammar.regex")
        case "choice":
            return _checked(_choice(grammar.choice.texts), "grammar.choice")
        case "grammar":
            return _checked(_free(grammar.grammar), "grammar.grammar")
        case None:
            raise InvalidRequestError("grammar has no form: set json_schema, json_object, regex, choice or grammar")


def json_form(schema: Json, path: str) -> Form:
    """Return the grammar of JSON that a schema accepts.

    Args:
        schema: JSON schema, draft 2020-12.
        path: of the schema in the request, for errors.

    Raises:
        InvalidRequestError: naming the part of the schema that cannot be obeyed.
    """
    _check_multiples(json.dumps(schema), 0, path)
    if (loop := _loop(schema)) is not None:
        raise InvalidRequestError(f"{path}{loop}.$ref must lead to a schema, it leads back to itself")
    try:
        form = Form("start: @json", {"json": {"json_schema": _with_options(schema)}})
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not supported: {error}") from error
    trouble = _trouble(form)
    if trouble:
        where = _located(schema)
        inner = _trouble_of_schema(where.schema, schema) or trouble
        if where.is_exact and (found := _UNKNOWN_KEY.fullmatch(inner)):
            raise InvalidRequestError(f"{path}{where.path}.{found[1]} is not supported")
        raise InvalidRequestError(f"{path}{where.path} is not supported: {inner}")
    return form


def _check_multiples(text: str, start: int, path: str) -> None:
    """Refuse a schema, as text from `start` on, whose multipleOf would take seconds to compile."""
    found = list[Decimal]()

    def note(pairs: list[tuple[str, Any]]) -> None:
        found.extend(value for key, value in pairs if key == "multipleOf" and isinstance(value, Decimal))

    try:
        json.JSONDecoder(object_pairs_hook=note, parse_float=Decimal, parse_int=Decimal).raw_decode(text, start)
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise InvalidRequestError(f"{path} is not JSON") from error
    together = 1
    for one in found:
        if abs(one.adjusted()) > _MULTIPLE_DIGITS_MAX or len(one.as_tuple().digits) > _MULTIPLE_DIGITS_MAX:
            raise InvalidRequestError(f"{path} has multipleOf with more than {_MULTIPLE_DIGITS_MAX} digits")
        if one.normalize().as_tuple().digits != (1,):
            together = math.lcm(together, abs(Fraction(one).numerator))
        if together > _MULTIPLE_MAX:
            raise InvalidRequestError(
                f"{path} has multipleOf with a least common multiple of {together}, at most {_MULTIPLE_MAX} is possible"
            )


def constraint_of(form: Form) -> str:
    """Return what workers obey, as SamplingParams.constraint."""
    nested = [{"name": name, **grammar} for name, grammar in form.nested.items()]
    return json.dumps({"grammars": [{"lark_grammar": form.lark}, *nested]}, ensure_ascii=False)


def either(first: Form, second: Form) -> Form:
    """Return the grammar of what one of two allows; their nested grammars have different names."""
    assert not first.nested.keys() & second.nested.keys()
    nested = {"first": {"lark_grammar": first.lark}, "second": {"lark_grammar": second.lark}}
    return Form("start: @first | @second", {**nested, **first.nested, **second.nested})


def after_thinking(form: Form, opening: str, closing: str, is_token: bool, is_open: bool) -> Form:
    """Return a grammar that lets the model think before it answers.

    Args:
        form: of the answer.
        opening: how thinking begins, in Lark: a quoted text or a special token.
        closing: how it ends.
        is_token: whether the closing is a special token.
        is_open: whether the prompt ends inside the thinking, so that it goes on; otherwise it may be left out.
    """
    text = "/(?s:.*)/"
    rule = f"thought: {text} {closing}" if is_token else f"thought[suffix={closing}]: {text}"
    thought = f"{rule}\ngap: /\\s{{0,8}}/\n"
    start = "start: thought gap @answer\n" if is_open else f"start: (gap {opening} thought)? gap @answer\n"
    return Form(start + thought, {"answer": {"lark_grammar": form.lark}, **form.nested})


def quoted(text: str) -> str:
    """Return text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


class _Place(NamedTuple):
    """A part of a schema."""

    path: str
    schema: Any
    is_exact: bool = True
    """Whether the trouble is its own, and not that of a part of it."""


def _located(root: Json) -> _Place:
    """Return the smallest part of a schema that cannot be obeyed, by trying parts of parts; after many, a larger."""
    place, tries = _Place("", root), 0
    while True:
        for name, part in _parts(place.schema):
            tries += 1
            if tries > _TRIES_MAX:
                return place._replace(is_exact=False)
            if _trouble_of_schema(part, root):
                place = _Place(place.path + name, part)
                break
        else:
            return place


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        match key, value:
            case (("properties" | "patternProperties" | "$defs" | "definitions"), dict()):
                yield from ((f".{key}.{name}", part) for name, part in value.items())
            case (("anyOf" | "oneOf" | "allOf" | "prefixItems"), list()):
                yield from ((f".{key}[{number}]", part) for number, part in enumerate(value))
            case (("items" | "additionalProperties"), dict()):
                yield f".{key}", value


def _loop(root: Json) -> str | None:
    """Return the path of a part whose references lead back to it with nothing between; None if there is none.

    A part that refers to one around it is no such thing: it describes another value. The library would say so only
    where it knows the tokenizer, in the workers.
    """
    ending = set[int]()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        path, part = left.pop()
        left += [(path + name, inner) for name, inner in _parts(part)]
        passed = set[int]()
        while isinstance(part, dict) and isinstance(part.get("$ref"), str) and id(part) not in ending:
            if id(part) in passed:
                return path
            passed.add(id(part))
            part = _target(root, part["$ref"])
        ending |= passed
    return None


def _target(root: Json, reference: str) -> Any:
    """Return the part that a reference names; None if it is not one of this schema, or not there."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    part: Any = root
    for name in unquote(reference).split("/")[1:]:
        if isinstance(part, list) and name.isdecimal():
            part = part[int(name)] if int(name) < len(part) else None
        else:
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part


def _trouble_of_schema(part: Any, root: Json) -> str:
    if not isinstance(part, dict):
        return "" if isinstance(part, bool) else "a schema must be an object, true or false"
    if part is not root:
        # Its own trouble only: what it refers to is looked at where it stands.
        known = {key: root[key] for key in ("$defs", "definitions") if isinstance(root.get(key), dict)}
        referred = _referred(part)
        part = {**{key: {name: True for name in known[key] if name in referred} for key in known}, **part}
    return _trouble(Form("start: @json", {"json": {"json_schema": part}}))


def _referred(part: Json) -> set[str]:
    """Return the last names of all references in a part."""
    found, left = set[str](), list[Any]([part])
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
            if isinstance(reference := value.get("$ref"), str):
                found.add(reference.rpartition("/")[2])
        elif isinstance(value, list):
            left += value
    return found


def _with_options(schema: Json) -> Json:
    # On one line: where line ends were allowed, the demo model wrote one before each colon, and they cost tokens.
    text = llguidance.LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
    )
    made: Json = json.loads(text)
    [grammar] = made["grammars"]
    result: Json = grammar["json_schema"]
    return result


def _trouble(form: Form) -> str:
    """Return why a grammar cannot be obeyed, in one line; empty if it can."""
    is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        constraint_of(form), None, limits=parser_limits()
    )
    return " ".join(" ".join(messages).split()) if is_wrong else ""


def _checked(form: Form, path: str) -> Form:
    if trouble := _trouble(form):
        raise InvalidRequestError(f"{path} is not supported: {trouble}")
    return form


def parsed_schema(text: str, path: str, depth_max: int) -> Json:
    """Read a JSON schema.

    Raises:
        InvalidRequestError: no JSON, no object, or too deep.
    """
    schema = parsed_object(text, path)
    if _depth(schema) > depth_max:
        raise InvalidRequestError(f"{path} must have at most {depth_max} levels, got {_depth(schema)}")
    return schema


def parsed_object(text: str, path: str) -> Json:
    """Read a JSON object that a client wrote as text.

    Raises:
        InvalidRequestError: no JSON, no object, half a character, or some 200 levels.
    """
    try:
        # Not `json`: it takes half a character, which no tokenizer does, and more levels than it can write again.
        value = from_json(text)
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be a JSON object, got {type(value).__name__}")
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth


def _choice(texts: Sequence[str]) -> Form:
    if not 1 <= len(texts) <= CHOICES_MAX:
        raise InvalidRequestError(f"grammar.choice must have 1 to {CHOICES_MAX} texts, got {len(texts)}")
    for number, text in enumerate(texts):
        if not text:
            raise InvalidRequestError(f"grammar.choice[{number}] is empty")
    return Form("start: " + " | ".join(map(quoted, texts)))


def _free(text: str) -> Form:
    try:
        lark = gbnf_to_lark.any_to_lark(text)
    except Exception as error:  # the converter raises nothing more specific
        raise InvalidRequestError(f"grammar.grammar is not EBNF: {error}") from error
    for schema in _JSON_IN_LARK.finditer(lark):
        _check_multiples(lark, schema.end(), "grammar.grammar's %json")
    return Form(lark)


def _lark_of(made: str) -> Form:
    [grammar] = json.loads(made)["grammars"]
    return Form(grammar["lark_grammar"])
