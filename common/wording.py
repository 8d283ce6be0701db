"""What is wrong with a field, in words of ours: pydantic's speak of its own insides, and of Python's types."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pydantic
    from pydantic_core import ErrorDetails

_KINDS = {
    "string_type": "text",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "path_type": "a path",
    "none_required": "null",
}
_VALIDATORS = ("value_error", "assertion_error")
_LIMITS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def sentence(name: str, error: "ErrorDetails") -> str:
    """Return what is wrong with the field of this name. A validator's words stand behind a colon."""
    return f"{name}{':' if error['type'] in _VALIDATORS else ''} {reason(error)}"


def sentences(error: "pydantic.ValidationError", whole: str, begin: int = 0) -> str:
    """Return all that is wrong, without the values given: they may be secrets.

    Args:
        error: what the fields of something have.
        whole: what it is called itself.
        begin: parts of each field's path that are left out.
    """
    found = error.errors(include_url=False, include_input=False)
    return "; ".join(sentence(".".join(map(str, one["loc"][begin:])) or whole, one) for one in found)


def counted(count: int | str, thing: str) -> str:
    """Return so many things, in words: `1 item`, `2 items`."""
    return f"{count} {thing}{'' if str(count) == '1' else 's'}"


def kind_wanted(error: "ErrorDetails") -> str:
    """Return what a value should have been that is of another type, or none of a few; empty if it was."""
    match error["type"]:
        case "literal_error" | "enum":
            return str(error["ctx"]["expected"])
        case "union_tag_invalid":
            return _or(str(error["ctx"]["expected_tags"]).split(", "))
        case kind:
            return _KINDS.get(kind, "")


def reason(error: "ErrorDetails") -> str:
    """Return what is wrong, to be put behind the field's name. A validator's own words stay as they are.

    Args:
        error: with its context.
    """
    if kind := kind_wanted(error):
        return f"must be {kind}"
    context: dict[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "missing" | "union_tag_not_found":
            return "is missing"
        case "extra_forbidden":
            return "is an unknown field"
        case "too_short" | "string_too_short" | "too_long" | "string_too_long" as kind:
            thing = "character" if kind.startswith("string") else "item"
            word, most = ("least", "min_length") if kind.endswith("short") else ("most", "max_length")
            given = context.get("actual_length")
            return f"must have at {word} {counted(context[most], thing)}" + ("" if given is None else f", got {given}")
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}"
        case kind if kind in _VALIDATORS:
            return str(context["error"])
        case kind if kind in _LIMITS:
            word, name = _LIMITS[kind]
            return f"must be {word} {_shown(context[name])}"
        case _:
            return error["msg"][:1].lower() + error["msg"][1:]


def _shown(limit: Any) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _or(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
