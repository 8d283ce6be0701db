"""A small synchronous client of the gateway, for the command line and for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import grpc

from baton_pb.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc, router_pb2
from common.errors import ConfigError, InvalidRequestError, WorkerLostError
from common.rpc import is_address
from common.status import typed_rpc_errors

_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
_STATUS_TIMEOUT_S = 10.0


class Client:
    """One connection to a gateway. Not safe to share between threads; use it in a `with` block.

    Args:
        address: HOST:PORT of its gRPC API.
        key: an API key; None: a gateway that asks for none.
        ca: PEM of authorities, one of which must have certified the gateway; None: it is not encrypted.

    Raises:
        ConfigError: the address is not HOST:PORT.
    """

    def __init__(self, address: str, key: str | None = None, ca: bytes | None = None) -> None:
        if not is_address(address):
            raise ConfigError(f"the gateway's address must be HOST:PORT, e.g. 127.0.0.1:50051, got {address!r}")
        self.address = address
        options = [
            ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
            ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
        ]
        if ca is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options)
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Send a request and yield what comes back; the last response carries `finished`. Closing the iterator cancels.

        Args:
            request: see proto/baton_pb/v1/inference.proto.
            timeout_s: deadline for the whole answer, None for none.

        Raises:
            BatonError: with the class and the words that the cluster gave; `WorkerLostError` if it cannot be reached.
        """
        call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with self._errors():
                yield from call
        finally:
            call.cancel()  # type: ignore[no-untyped-call]  # the stubs leave it untyped

    def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> admin_pb2.ClusterStatus:
        """Return the cluster's status.

        Raises:
            BatonError: as for `generate`.
        """
        with self._errors():
            return self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s, metadata=self._metadata)

    def explain(self, request_id: str, timeout_s: float = _STATUS_TIMEOUT_S) -> router_pb2.ExplainReply:
        """Return why a request went where it did.

        Raises:
            NotFoundError: it is not known, or not any more.
            BatonError: as for `generate`.
        """
        asked = router_pb2.ExplainRequest(request_id=request_id)
        with self._errors():
            return self._admin.Explain(asked, timeout=timeout_s, metadata=self._metadata)

    def model_id(self, timeout_s: float = _STATUS_TIMEOUT_S) -> str:
        """Return the name of what is served; empty: nothing that the key may use.

        Raises:
            BatonError: as for `generate`.
        """
        asked = inference_pb2.ListModelsRequest()
        with self._errors():
            models = self._inference.ListModels(asked, timeout=timeout_s, metadata=self._metadata).models
        return models[0].id if models else ""

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with typed_rpc_errors():
                yield
        except WorkerLostError as error:
            raise WorkerLostError(_in_our_words(error.message, self.address), error.retry_after_s) from error


def _in_our_words(message: str, address: str) -> str:
    """Return what to say instead of gRPC's words for a gateway that cannot be spoken to; others are kept."""
    if "Failed parsing HTTP/2" in message:
        return f"what listens on {address} does not speak gRPC: --addr wants the gateway's gRPC port, not its HTTP port"
    if message.startswith("errors resolving"):
        return f"there is no host for {address}: name a gateway with --addr"
    if "WRONG_VERSION_NUMBER" in message:
        return f"what listens on {address} does not encrypt: leave out --ca"
    if "handshake failed" in message:
        return f"the certificate of {address} is not by an authority of --ca, or not for this name"
    if "Socket closed" in message:
        return f"what listens on {address} hangs up without a word: if it encrypts, it needs --ca"
    if "failed to connect" in message:
        return f"nobody listens on {address}: start a cluster with `baton serve`, or name one with --addr"
    return message


@contextmanager
def fits_the_protocol(what: str) -> Iterator[None]:
    """Turn a value that no message can carry, e.g. a number too large or text that is not Unicode, into our error.

    Raises:
        InvalidRequestError: naming `what` was being said.
    """
    try:
        yield
    except ValueError as error:  # also what text that is not Unicode raises
        raise InvalidRequestError(f"{what}: {str(error)[:1].lower()}{str(error)[1:]}") from error


def chat_request(messages: list[tuple[str, str]], sampling: common_pb2.SamplingParams) -> inference_pb2.GenerateRequest:
    """Return a request for the next turn of a conversation, given as (role, content) pairs.

    Raises:
        InvalidRequestError: a message that is not Unicode.
    """
    with fits_the_protocol("prompt"):
        chat = inference_pb2.ChatMessages(
            messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
        )
        return inference_pb2.GenerateRequest(chat=chat, sampling=sampling)
