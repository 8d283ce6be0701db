"""Every error that crosses a process. common/status.py maps them to gRPC and HTTP codes."""

import re

MESSAGE_CHARACTERS_MAX = 400
"""Longest message. It may quote what a client sent, and a gRPC status has room for 8 KB, in which a character can take
12, and 6 more in the details: a longer one would arrive as RESOURCE_EXHAUSTED, whatever its code was."""
_CUT = " ... "
_FIELD = re.compile(r"([a-z][a-z0-9_-]*(?:[.\[]\S*)?) (?:is|are|must|has|have) ")


class BatonError(Exception):
    """Root of all operating errors: something went wrong that is not the caller's fault. Programmer errors assert."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        if len(message) > MESSAGE_CHARACTERS_MAX:
            half = (MESSAGE_CHARACTERS_MAX - len(_CUT)) // 2
            message = message[:half] + _CUT + message[-half:]
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequestError(BatonError):
    """The request can never succeed as it is.

    The message begins with the field that it is about, and names the limit and the value: `stop[2] must have ...`.
    """

    @property
    def field(self) -> str:
        """The path of the field that is wrong; empty if the message is about no single one."""
        found = _FIELD.match(self.message)
        return "" if found is None else found[1]


class NotFoundError(BatonError):
    """A name in the request (model, request id) means nothing here."""


class OverloadedError(BatonError):
    """No room now; `retry_after_s` says when to try again."""

    subject = "cluster"
    """Whose room is used up."""


class DeadlineError(BatonError):
    """The request's deadline passed."""


class CancelledRequestError(BatonError):
    """The client went away or asked to stop."""


class MismatchError(BatonError):
    """Two processes do not agree on model, layout, dtype or hash; nothing was exchanged."""


class UnauthenticatedError(BatonError):
    """The caller did not show who it is, or showed a wrong secret."""


class PermissionDeniedError(BatonError):
    """The caller is known, and may not do this."""


class WorkerLostError(BatonError):
    """The process that worked on this is gone or unreachable; another may succeed."""


class TransferError(WorkerLostError):
    """KV did not arrive, or did not arrive intact; prefilling again may succeed."""


class ConfigError(BatonError):
    """The configuration or the set-up of this machine is wrong; shown as one line by the command line."""
