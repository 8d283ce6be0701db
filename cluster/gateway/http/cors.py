"""What browsers must be told before a page from elsewhere may use the API: nothing, unless its origin is allowed."""

from collections.abc import Collection, Mapping

ANY = "*"
_SECONDS = "86400"


def cors_headers(headers: Mapping[str, str], origins: Collection[str]) -> dict[str, str]:
    """Return the headers of every answer to a page of an allowed origin; empty for all others.

    Args:
        headers: the request's.
        origins: those that are allowed; `*`: all.
    """
    origin = headers.get("origin")
    if origin is None or (origin not in origins and ANY not in origins):
        return {}
    shown = {"access-control-allow-origin": origin, "vary": "origin"}
    return {**shown, "access-control-expose-headers": "x-request-id, retry-after"}


def preflight_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what is said besides to a browser that asks before it sends the request itself."""
    asked = headers.get("access-control-request-headers", "authorization, content-type")
    allowed = {"access-control-allow-methods": "GET, POST", "access-control-allow-headers": asked}
    return {**allowed, "access-control-max-age": _SECONDS}
