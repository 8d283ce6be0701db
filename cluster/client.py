"""The synchronous client of the gateway's gRPC API: for programs, for the command line and for tests.

with Client("127.0.0.1:50051") as client:
    print(client.ask(chat_request("Why is the sky blue?", {"max_tokens": 40})).text)
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import grpc

from baton_pb.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, router_pb2
from cluster.asking import (
    CALL_TIMEOUT_S,
    OPTIONS,
    USUAL_RETRIES,
    Answer,
    Retries,
    addresses_of,
    answers_of,
    error_at,
    in_turn,
)
from common.errors import BatonError

T = TypeVar("T")


class _Gateway(NamedTuple):
    """One of those that may be asked."""

    address: str
    channel: grpc.Channel
    inference: inference_pb2_grpc.InferenceStub
    admin: admin_pb2_grpc.AdminStub


class Client:
    """Connections to one gateway or several. Not safe to share between threads; use it in a `with` block.

    Args:
        address: HOST:PORT of its gRPC API; several ones with commas: requests go to each in turn, and a gateway that is
            away costs an attempt.
        key: an API key; None: a gateway that asks for none.
        ca: PEM of authorities, one of which must have certified the gateway; None: it is not encrypted.
        retries: when to send a request again.

    Raises:
        ConfigError: the address is not HOST:PORT.
    """

    def __init__(
        self, address: str, key: str | None = None, ca: bytes | None = None, retries: Retries = USUAL_RETRIES
    ) -> None:
        self.address = address
        self._gateways = [_connect(one, ca) for one in addresses_of(address)]
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._retries = retries
        self._turn = count()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; running calls are cancelled."""
        for gateway in self._gateways:
            gateway.channel.close()

    def ask(self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None) -> Answer:
        """Send a request and return the whole answer, the first one if it asks for several.

        Raises:
            BatonError: as for `generate`.
        """
        return self.ask_all(request, timeout_s)[0]

    def ask_all(self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None) -> list[Answer]:
        """Send a request and return its answers, `n` for each prompt.

        Raises:
            BatonError: as for `generate`.
        """
        return answers_of(self.generate(request, timeout_s), request)

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Send a request and yield what comes back; the last response carries `finished`. Closing the iterator cancels.

        A request of which nothing has come is sent again when that may help, see Retries.

        Args:
            request: see proto/baton_pb/v1/inference.proto.
            timeout_s: deadline for the whole answer, attempts and waits included; None for none.

        Raises:
            BatonError: with the class and the words that the cluster gave; `WorkerLostError` if it cannot be reached.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for attempt, gateway in enumerate(self._in_turn(), 1):
            has_begun = False
            try:
                with closing(self._stream(gateway, request, deadline)) as responses:
                    for response in responses:
                        has_begun = True
                        yield response
                return
            except BatonError as error:
                wait_s = None if has_begun else self._retries.wait_s(attempt, error, _left_s(deadline))
                if wait_s is None:
                    raise
            time.sleep(wait_s)

    def status(self, timeout_s: float = CALL_TIMEOUT_S) -> admin_pb2.ClusterStatus:
        """Return the cluster's status.

        Raises:
            BatonError: as for `generate`.
        """
        asked = admin_pb2.GetStatusRequest()
        return self._call(
            lambda one, left_s: one.admin.GetStatus(asked, timeout=left_s, metadata=self._metadata), timeout_s
        )

    def explain(self, request_id: str, timeout_s: float = CALL_TIMEOUT_S) -> router_pb2.ExplainReply:
        """Return why a request went where it did.

        Raises:
            NotFoundError: it is not known, or not any more.
            BatonError: as for `generate`.
        """
        asked = router_pb2.ExplainRequest(request_id=request_id)
        return self._call(
            lambda one, left_s: one.admin.Explain(asked, timeout=left_s, metadata=self._metadata), timeout_s
        )

    def model_id(self, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Return the name of what is served; empty: nothing that the key may use.

        Raises:
            BatonError: as for `generate`.
        """
        asked = inference_pb2.ListModelsRequest()
        listed = self._call(
            lambda one, left_s: one.inference.ListModels(asked, timeout=left_s, metadata=self._metadata), timeout_s
        )
        return listed.models[0].id if listed.models else ""

    def _call(self, send: Callable[[_Gateway, float], T], timeout_s: float) -> T:
        """Make a call that gives one message, again when that may help."""
        deadline = time.monotonic() + timeout_s
        for attempt, gateway in enumerate(self._in_turn(), 1):
            try:
                return send(gateway, max(0.0, deadline - time.monotonic()))
            except grpc.RpcError as error:
                found = error_at(gateway.address, error)
                wait_s = self._retries.wait_s(attempt, found, _left_s(deadline))
                if wait_s is None:
                    raise found from error
            time.sleep(wait_s)
        raise AssertionError("unreachable")

    def _stream(
        self, gateway: _Gateway, request: inference_pb2.GenerateRequest, deadline: float | None
    ) -> Generator[inference_pb2.GenerateResponse, None, None]:
        call: Any = gateway.inference.Generate(request, timeout=_left_s(deadline), metadata=self._metadata)
        has_begun = False
        try:
            for response in call:
                has_begun = True
                yield response
        except grpc.RpcError as error:
            raise error_at(gateway.address, error, has_begun) from error
        finally:
            call.cancel()

    def _in_turn(self) -> Iterator[_Gateway]:
        return in_turn(self._gateways, next(self._turn))


def _connect(address: str, ca: bytes | None) -> _Gateway:
    if ca is None:
        channel = grpc.insecure_channel(address, OPTIONS)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), OPTIONS)
    return _Gateway(address, channel, inference_pb2_grpc.InferenceStub(channel), admin_pb2_grpc.AdminStub(channel))


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
