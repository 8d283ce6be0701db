"""Errors as OpenAI's clients know them: the body, the HTTP code, the header that says when to come back."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic

from common import errors, wording
from common.status import codes_of

TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""What an error is called, by its HTTP code."""
_RETRY_AFTER_S = 1.0
_LATER = (429, 503)
_TOLD_MAX = 2000
"""Faults of a body among which the one that was meant is looked for."""
_NAMES = {"token_ids": "prompt"}
"""Fields that HTTP has under another name."""


class HttpError(Exception):
    """A refusal that only HTTP knows: no such path, wrong method, a body that is too large or too slow."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


def head_too_large(most: int) -> HttpError:
    """Return the refusal of a request whose path and headers are too long."""
    return HttpError(431, f"the request line and the headers have more than {most} bytes", {"connection": "close"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a client gets instead of an answer."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def refusal_of(error: BaseException) -> Refusal:
    """Return what to answer; an error that is none of ours or pydantic's becomes a 500 that names its class."""
    match error:
        case HttpError():
            return Refusal(error.status, _body(error.status, error.message), error.headers)
        case pydantic.ValidationError():
            return _of_validation_error(error)
        case errors.BatonError():
            return _of_baton_error(error)
        case _:
            return Refusal(500, _body(500, f"internal error: {type(error).__name__}"))


def _of_baton_error(error: errors.BatonError) -> Refusal:
    status = codes_of(error).http
    headers = {}
    if status in _LATER:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or _RETRY_AFTER_S)))
    param = code = None
    if isinstance(error, errors.NotFoundError) and error.message.startswith("model "):
        code, param = "model_not_found", "model"
    elif isinstance(error, errors.UnauthenticatedError):
        code, headers["www-authenticate"] = "invalid_api_key", "Bearer"
    elif isinstance(error, errors.OverloadedError):
        code = "rate_limit_exceeded"
    elif isinstance(error, errors.DeadlineError):
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat what ended with 5xx, unless they are told
    elif isinstance(error, errors.InvalidRequestError):
        param = _NAMES.get(error.field, error.field) or None
        if "context window" in error.message:
            code = "context_length_exceeded"
    return Refusal(status, _body(status, error.message, param, code), headers)


def _body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _of_validation_error(error: pydantic.ValidationError) -> Refusal:
    if error.error_count() > _TOLD_MAX:  # each takes microseconds, and a body has room for millions
        return Refusal(400, _body(400, f"the body has {error.error_count()} faults, too many to tell"))
    found = error.errors(include_url=False, include_input=False)
    # Of the members of a union that failed, the one that got furthest is the one that was meant.
    about = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    furthest = max(about, key=lambda one: len(one["loc"]))
    param = _path(furthest["loc"], furthest["type"])
    same = [one for one in about if _path(one["loc"], one["type"]) == param]
    # Members that differ in kind say so all at once; the one that is of the given kind has more to say.
    furthest = next((one for one in same if not wording.kind_wanted(one)), furthest)
    reason = wording.reason(furthest)
    if furthest["type"] == "value_error" and not furthest["loc"]:
        named = _NAMED.match(reason)  # a rule about several fields names the first of them
        return Refusal(400, _body(400, reason, None if named is None else named[1]))
    if furthest["type"] == "json_invalid":
        return Refusal(400, _body(400, reason))
    name = param or "the body"
    if wording.kind_wanted(furthest):
        reason = f"must be {' or '.join(dict.fromkeys(filter(None, map(wording.kind_wanted, same))))}"
        return Refusal(400, _body(400, f"{name} {reason}", param or None))
    return Refusal(400, _body(400, wording.sentence(name, furthest), param or None))


_NAMED = re.compile(r"([a-z_]+) ")
_TYPE_NAMES = frozenset({"str", "int", "float", "bool"})
_IS_NAME = re.compile(r"[a-z0-9_]+")


def _path(location: tuple[int | str, ...], kind: str) -> str:
    """Return `messages[2].content`; names of a union's members are left out, they are ours and not the client's."""
    path = ""
    for number, part in enumerate(location):
        is_theirs = kind == "extra_forbidden" and number == len(location) - 1
        if isinstance(part, int):
            path += f"[{part}]"
        elif is_theirs or (number == 0) or (_IS_NAME.fullmatch(part) and part not in _TYPE_NAMES):
            path += f".{part}" if path else part
    return path
