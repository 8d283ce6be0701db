"""What the synchronous and the asynchronous client share: requests, whole answers, when to try again, words."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, TypeVar

import grpc

from baton_pb.v1 import common_pb2, inference_pb2
from common.errors import BatonError, ConfigError, InvalidRequestError, OverloadedError, WorkerLostError
from common.rpc import is_address
from common.status import error_from_rpc, is_said_by_server

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
CALL_TIMEOUT_S = 10.0
"""Of the calls that no model is asked for."""
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
]
Messages = str | Sequence[tuple[str, str]]
"""What a user says, or a conversation as (role, content) pairs."""
Sampling = common_pb2.SamplingParams | Mapping[str, Any]
"""The message, or its fields by name: `{"max_tokens": 40, "temperature": 0}`."""
T = TypeVar("T")
_RETRIED = (OverloadedError, WorkerLostError)


@dataclass(frozen=True, slots=True)
class Retries:
    """When to send a request again of which nothing has come yet: no room, or nobody there. Other errors are final.

    The wait doubles from `first_s` to `most_s`, half of it at random so that clients do not come back together, and
    is never shorter than what the server asks for.
    """

    attempts: int = 3
    first_s: float = 0.1
    most_s: float = 10.0

    def wait_s(self, attempt: int, error: BatonError, left_s: float | None) -> float | None:
        """Return how long to wait before the next attempt; None: there is none.

        Args:
            attempt: that failed, from 1.
            error: how.
            left_s: of the caller's deadline.
        """
        if attempt >= self.attempts or not isinstance(error, _RETRIED):
            return None
        wait_s = min(self.most_s, self.first_s * 2 ** (attempt - 1))
        wait_s = max(error.retry_after_s, wait_s * (0.5 + random.random() / 2))
        return wait_s if left_s is None or wait_s < left_s else None


USUAL_RETRIES = Retries()


def in_turn(gateways: Sequence[T], first: int) -> Iterator[T]:
    """Return whom to ask, one for each attempt: another one than the last, however many requests run at once."""
    return islice(cycle(gateways), first % len(gateways), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finished: inference_pb2.Finished
    """Why it ended, usage, timing in seconds, placement."""
    request_id: str = ""
    logprobs: tuple[common_pb2.SampledToken, ...] = field(default=())


def answers_of(
    responses: Iterable[inference_pb2.GenerateResponse], request: inference_pb2.GenerateRequest
) -> list[Answer]:
    """Return the answers that responses to a request add up to, one for each choice.

    Raises:
        WorkerLostError: one has no end.
    """
    count = (request.n or 1) * max(1, len(request.batch.prompts))
    parts: list[list[inference_pb2.GenerateResponse]] = [[] for _ in range(count)]
    for response in responses:
        parts[response.choice].append(response)
    return [_answer(one) for one in parts]


def _answer(parts: Sequence[inference_pb2.GenerateResponse]) -> Answer:
    if not parts or not parts[-1].HasField("finished"):
        raise WorkerLostError("the answer ended without a last message")
    return Answer(
        "".join(part.text for part in parts),
        tuple(token_id for part in parts for token_id in part.token_ids),
        parts[-1].finished,
        parts[-1].request_id,
        tuple(token for part in parts for token in part.logprobs),
    )


def chat_request(messages: Messages, sampling: Sampling | None = None) -> inference_pb2.GenerateRequest:
    """Return a request for the next turn of a conversation.

    Raises:
        InvalidRequestError: a message that is not Unicode, a field that does not exist or cannot hold its value.
    """
    turns = [("user", messages)] if isinstance(messages, str) else messages
    params = _sampling(sampling)
    with fits_the_protocol("prompt"):
        chat = inference_pb2.ChatMessages(
            messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in turns]
        )
        return inference_pb2.GenerateRequest(chat=chat, sampling=params)


def completion_request(prompt: str | Sequence[int], sampling: Sampling | None = None) -> inference_pb2.GenerateRequest:
    """Return a request to complete a text or token ids as they are.

    Raises:
        InvalidRequestError: as for `chat_request`.
    """
    made = inference_pb2.GenerateRequest(sampling=_sampling(sampling))
    with fits_the_protocol("prompt"):
        _set_prompt(made, prompt)
    return made


def batch_request(
    prompts: Sequence[str | Sequence[int]], sampling: Sampling | None = None
) -> inference_pb2.GenerateRequest:
    """Return a request to complete each of several prompts.

    Raises:
        InvalidRequestError: as for `chat_request`.
    """
    made = inference_pb2.GenerateRequest(sampling=_sampling(sampling), batch=inference_pb2.PromptBatch())
    with fits_the_protocol("prompts"):
        for prompt in prompts:
            _set_prompt(made.batch.prompts.add(), prompt)
    return made


def _set_prompt(
    made: inference_pb2.GenerateRequest | inference_pb2.PromptBatch.Prompt, prompt: str | Sequence[int]
) -> None:
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)


def _sampling(given: Sampling | None) -> common_pb2.SamplingParams:
    if isinstance(given, common_pb2.SamplingParams):
        return given
    with fits_the_protocol("sampling"):
        return common_pb2.SamplingParams(**(given or {}))


@contextmanager
def fits_the_protocol(what: str) -> Iterator[None]:
    """Turn a value that no message can carry, e.g. a number too large or text that is not Unicode, into our error.

    Raises:
        InvalidRequestError: naming `what` was being said.
    """
    try:
        yield
    except (ValueError, TypeError) as error:  # also what text that is not Unicode raises
        raise InvalidRequestError(f"{what}: {str(error)[:1].lower()}{str(error)[1:]}") from error


def addresses_of(text: str) -> list[str]:
    """Return the gateways that a comma-separated list names.

    Raises:
        ConfigError: one of them is not HOST:PORT.
    """
    found = text.split(",")
    for address in found:
        if not is_address(address):
            raise ConfigError(f"the gateway's address must be HOST:PORT, e.g. 127.0.0.1:50051, got {address!r}")
    return found


def error_at(address: str, error: grpc.RpcError, has_begun: bool = False) -> BatonError:
    """Return what a call to this gateway failed with; `has_begun`: after a part of its answer had come."""
    found = error_from_rpc(error)
    if not isinstance(found, WorkerLostError) or is_said_by_server(error):
        return found
    words = f"the connection to {address} broke in the middle of an answer" if has_begun else None
    return type(found)(words or in_our_words(found.message, address), found.retry_after_s)


def in_our_words(message: str, address: str) -> str:
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
