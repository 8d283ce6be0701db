"""The one map between errors, gRPC codes and HTTP codes, and the translation at the edges in both directions."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, NoReturn

import grpc

from baton_pb.v1 import common_pb2
from common import errors
from common.rich_status import DETAILS_KEY, details_of

RETRY_AFTER_KEY = "retry-after-s"


class Codes(NamedTuple):
    """How one class of errors looks outside."""

    grpc: grpc.StatusCode
    http: int


CODES: dict[type[errors.BatonError], Codes] = {
    errors.InvalidRequestError: Codes(grpc.StatusCode.INVALID_ARGUMENT, 400),
    errors.NotFoundError: Codes(grpc.StatusCode.NOT_FOUND, 404),
    errors.OverloadedError: Codes(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    errors.DeadlineError: Codes(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    errors.CancelledRequestError: Codes(grpc.StatusCode.CANCELLED, 499),
    errors.MismatchError: Codes(grpc.StatusCode.FAILED_PRECONDITION, 409),
    errors.UnauthenticatedError: Codes(grpc.StatusCode.UNAUTHENTICATED, 401),
    errors.PermissionDeniedError: Codes(grpc.StatusCode.PERMISSION_DENIED, 403),
    errors.WorkerLostError: Codes(grpc.StatusCode.UNAVAILABLE, 503),
    errors.TransferError: Codes(grpc.StatusCode.DATA_LOSS, 503),
    errors.ConfigError: Codes(grpc.StatusCode.ABORTED, 500),
    errors.BatonError: Codes(grpc.StatusCode.INTERNAL, 500),
}

_BY_GRPC = {codes.grpc: error for error, codes in CODES.items()}
_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
assert len(_BY_GRPC) == len(CODES), "two errors share a gRPC code: the map back would be ambiguous"


def codes_of(error: errors.BatonError) -> Codes:
    """Return the codes of `error`'s class, or of its nearest listed ancestor."""
    return next(CODES[cls] for cls in type(error).__mro__ if cls in CODES)


def error_from_code(code: grpc.StatusCode, message: str, retry_after_s: float = 0.0) -> errors.BatonError:
    """Return the error whose class is mapped to `code`; `BatonError` for a code that none has."""
    return _BY_GRPC.get(code, errors.BatonError)(message, retry_after_s)


def error_to_pb(error: errors.BatonError) -> common_pb2.Error:
    """Encode `error` for a message."""
    return common_pb2.Error(
        code=codes_of(error).grpc.value[0], message=error.message, retry_after_s=error.retry_after_s
    )


def error_from_pb(error: common_pb2.Error) -> errors.BatonError:
    """Decode an error from a message; an unknown code becomes a `BatonError`."""
    code = _BY_NUMBER.get(error.code, grpc.StatusCode.INTERNAL)
    return error_from_code(code, error.message, error.retry_after_s)


def error_from_rpc(error: grpc.RpcError) -> errors.BatonError:
    """Translate what a gRPC call raised. A broken connection is a `WorkerLostError`."""
    # AioRpcError and the synchronous errors share these methods, but grpc.RpcError does not declare them.
    call: Any = error
    retry_after = {str(k): str(v) for k, v in call.trailing_metadata() or ()}.get(RETRY_AFTER_KEY, "0")
    return error_from_code(call.code(), call.details() or "", float(retry_after))


def is_said_by_server(error: grpc.RpcError) -> bool:
    """Return whether a call was ended by `abort_rpc`, and not by a connection that broke or never was."""
    call: Any = error
    return any(key == DETAILS_KEY for key, _ in call.trailing_metadata() or ())


@contextmanager
def typed_rpc_errors() -> Iterator[None]:
    """Turn gRPC errors of calls made inside into ours, keeping the cause."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


async def abort_rpc(
    context: "grpc.aio.ServicerContext[Any, Any]", error: errors.BatonError, path: Callable[[str], str] = str
) -> NoReturn:
    """End a server-side call with `error`'s code, its words and details, and retry-after metadata where it has one.

    Args:
        context: the call's.
        error: what happened.
        path: a field's name as errors have it -> its path in the call's request.
    """
    code = codes_of(error).grpc
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_KEY, details_of(error, code.value[0], path))]
    if error.retry_after_s:
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    await context.abort(code, error.message, tuple(metadata))
    raise AssertionError("abort returned")


@asynccontextmanager
async def rpc_errors_to_status(
    context: "grpc.aio.ServicerContext[Any, Any]", path: Callable[[str], str] = str
) -> AsyncIterator[None]:
    """Turn our errors raised inside a server-side call into its status; `path` is as for `abort_rpc`."""
    try:
        yield
    except errors.BatonError as error:
        await abort_rpc(context, error, path)
