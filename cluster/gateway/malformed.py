"""Bytes that are no message end in INVALID_ARGUMENT, not in gRPC's INTERNAL: the client made the mistake."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from common.errors import InvalidRequestError
from common.status import abort_rpc


class _Malformed:
    """Stands for a message that could not be read."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class MalformedInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps the calls that take one message. All values are Any: gRPC's handlers are untyped."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, with a reader that does not raise."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        read = _tolerant(handler.request_deserializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _refusing(handler.unary_stream), read, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(_refusing(handler.unary_unary), read, handler.response_serializer)


def _tolerant(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read_or_mark(data: bytes) -> Any:
        try:
            return read(data)
        except (DecodeError, UnicodeDecodeError) as error:
            return _Malformed(str(error))

    return read_or_mark


def _refusing(serve: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def serve_or_refuse(request: Any, context: Any) -> Any:
        if isinstance(request, _Malformed):
            message = f"the request is no valid message (text must be UTF-8): {request.reason}"
            await abort_rpc(context, InvalidRequestError(message))
        return await serve(request, context)

    return serve_or_refuse
