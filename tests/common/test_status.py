"""Every error keeps its class, words and retry-after on the way through messages and calls."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from common import errors
from common.status import (
    CODES,
    codes_of,
    error_from_code,
    error_from_pb,
    error_to_pb,
    rpc_errors_to_status,
    typed_rpc_errors,
)


def _all_errors() -> list[type[errors.BatonError]]:
    found: list[type[errors.BatonError]] = [errors.BatonError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return [cls for cls in found if cls.__module__ == "common.errors"]


every_error = pytest.mark.parametrize("cls", _all_errors())


@every_error
def test_every_error_has_codes_of_its_own(cls: type[errors.BatonError]) -> None:
    assert cls in CODES
    assert [other for other in CODES if CODES[other].grpc is CODES[cls].grpc] == [cls]


@every_error
def test_an_error_survives_a_message(cls: type[errors.BatonError]) -> None:
    error = error_from_pb(error_to_pb(cls("need 4 blocks, 1 available", 2.5)))

    assert type(error) is cls
    assert error.message == "need 4 blocks, 1 available"
    assert error.retry_after_s == 2.5


def test_an_error_of_a_subclass_has_its_parents_codes() -> None:
    class Special(errors.TransferError):
        pass

    assert codes_of(Special("x")) == CODES[errors.TransferError]


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(error_from_code(grpc.StatusCode.UNIMPLEMENTED, "x")) is errors.BatonError
    assert type(error_from_pb(error_to_pb(errors.BatonError("x")))) is errors.BatonError


def _after_a_call(raised: errors.BatonError) -> errors.BatonError:
    """Return what a caller gets when a server's method raises an error."""

    async def serve(request: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        async with rpc_errors_to_status(context):
            raise raised

    async def scenario() -> errors.BatonError:
        server = grpc.aio.server()
        handler = grpc.method_handlers_generic_handler("s", {"m": grpc.unary_unary_rpc_method_handler(serve)})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call: Any = channel.unary_unary("/s/m", None, None)
                with pytest.raises(errors.BatonError) as caught, typed_rpc_errors():
                    await call(b"", timeout=5)
                return caught.value
        finally:
            await server.stop(None)

    return asyncio.run(scenario())


@every_error
def test_an_error_survives_a_call(cls: type[errors.BatonError]) -> None:
    error = _after_a_call(cls("the worker's own words", 1.5))

    assert type(error) is cls
    assert error.message == "the worker's own words"
    assert error.retry_after_s == 1.5
    assert isinstance(error.__cause__, grpc.RpcError)


@pytest.mark.parametrize("character", ["x", "\N{SLIGHTLY SMILING FACE}"])
def test_an_error_that_quotes_a_long_text_keeps_its_class_and_both_ends(character: str) -> None:
    error = _after_a_call(errors.NotFoundError(f"model {character * 100_000} is not served here", 1.5))

    assert type(error) is errors.NotFoundError
    assert error.message.startswith(f"model {character}")
    assert error.message.endswith(f"{character} is not served here")
    assert len(error.message) <= errors.MESSAGE_CHARACTERS_MAX


def test_a_connection_that_cannot_be_made_is_a_lost_worker() -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            call: Any = channel.unary_unary("/s/m", None, None)
            with typed_rpc_errors():
                await call(b"", timeout=5)

    with pytest.raises(errors.WorkerLostError):
        asyncio.run(scenario())
