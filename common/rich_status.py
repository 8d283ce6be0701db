"""An error's details as other people's gRPC tools read them: a google.rpc.Status beside the code and the words."""

from collections.abc import Callable

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from common.errors import BatonError, InvalidRequestError, OverloadedError

DETAILS_KEY = "grpc-status-details-bin"
"""The trailing metadata in which gRPC's libraries look for them."""
_DESCRIPTION_CHARACTERS_MAX = 64
"""Of a description that is not ASCII: all of a status has to fit into 8 KB, see common/errors.py."""


def details_of(error: BatonError, code: int, path: Callable[[str], str]) -> bytes:
    """Return the serialized status: which field is wrong, when to retry, which quota is used up.

    Args:
        error: what happened.
        code: its gRPC code's number.
        path: a field's name as errors have it -> its path in the request.
    """
    status = status_pb2.Status(code=code, message=error.message)
    for detail in _details(error, path):
        status.details.add().Pack(detail)
    serialized: bytes = status.SerializeToString()
    return serialized


def _details(error: BatonError, path: Callable[[str], str]) -> list[Message]:
    found: list[Message] = []
    description = error.message if error.message.isascii() else error.message[:_DESCRIPTION_CHARACTERS_MAX]
    if isinstance(error, InvalidRequestError) and error.field:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=path(error.field), description=description)
        found.append(bad)
    if isinstance(error, OverloadedError):
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.subject, description=description)
        found.append(quota)
    if error.retry_after_s:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        found.append(retry)
    return found


def path_in(request: Message) -> Callable[[str], str]:
    """Return a function that finds a field, named as errors name it, in a request or in one of its messages.

    `max_tokens` -> `sampling.max_tokens`; `prompt` -> the kind of prompt that the request has.
    """

    def path(field: str) -> str:
        name = field.partition("[")[0].partition(".")[0]
        descriptor = request.DESCRIPTOR
        if name in descriptor.oneofs_by_name:
            return request.WhichOneof(name) or field
        if name in descriptor.fields_by_name:
            return field
        parents = (one for one in descriptor.fields if one.message_type and name in one.message_type.fields_by_name)
        return next((f"{parent.name}.{field}" for parent in parents), field)

    return path
