"""Streams of tokens from decode workers: one long-lived session with each, shared by all requests there."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from baton_pb.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from cluster.gateway.outbox import Outbox
from cluster.gateway.turns import Turns
from common.errors import BatonError, DeadlineError, OverloadedError, WorkerLostError
from common.logs import log
from common.rpc import open_channel
from common.status import error_from_pb, error_from_rpc
from common.waits import Waits

_LOG = logging.getLogger(__name__)
_OUTBOX_MAX = 4096
_TURNS_AT_ONCE = 1
"""Streams that go on in one pass of the loop, see turns.py: a new request waits for so many writes. With 16, a busy
loop relays half as many tokens."""
SUMMARY_WAIT_S = 0.25
"""How long the summary of a sequence that was cancelled for a stop string is waited for."""


class SessionLostError(WorkerLostError):
    """The session with the decode worker broke: it is this worker that was lost, and no other."""


class UnreadError(OverloadedError):
    """The client does not read its tokens: no worker's fault, and another one would not help."""


class Outputs(NamedTuple):
    """What a sequence has produced since last asked."""

    tokens: list[common_pb2.SampledToken]
    finished: worker_pb2.SequenceFinished | None
    """Set once, at its end."""


class StreamLimits(NamedTuple):
    """For each sequence."""

    unread_tokens_max: int
    """Tokens that may wait for a client that does not read."""
    token_wait_s: float
    """A worker may live and yet do nothing: longest time without a token."""


class SequenceStream:
    """One sequence's tokens, as one request reads them. Outputs that wait add up; there is a limit to them."""

    def __init__(
        self, client: "DecodeClient", request_id: str, limits: StreamLimits, turns: Turns, waits: Waits
    ) -> None:
        self.request_id = request_id
        self.on_end: Callable[[worker_pb2.SequenceFinished | None, int], None] | None = None
        """Called at the end, however late that is read: with the summary, unless it failed, and the tokens unread."""
        self._client = client
        self._limits = limits
        self._turns = turns
        self._waits = waits
        self._has_begun = False
        self._waits_for_turn = False
        self._is_closed = False
        self._tokens: list[common_pb2.SampledToken] = []
        self._finished: worker_pb2.SequenceFinished | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()

    async def next(self) -> Outputs:
        """Wait for outputs and, after the first ones, for a turn; take all there are by then.

        Raises:
            DeadlineError: none came for too long.
            BatonError: what ended the sequence, after all its tokens were taken.
        """
        self._waits.begin(self._late)
        while self._waits_for_turn or not (self._tokens or self._is_ended):
            self._changed.clear()
            await self._changed.wait()
        self._waits.end(self._late)
        self._has_begun = True
        if self._error is not None and not self._tokens:
            raise self._error
        tokens, self._tokens = self._tokens, []
        return Outputs(tokens, self._finished)

    async def stop(self) -> worker_pb2.SequenceFinished | None:
        """Cancel the sequence and return its summary; None if the worker gives none within SUMMARY_WAIT_S."""
        self._has_begun = False  # what is waited for is one message: it needs no turn
        if not self._is_ended:
            self._client.cancel(self.request_id, wants_summary=True)
        try:
            async with asyncio.timeout(SUMMARY_WAIT_S):
                while not self._is_ended:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.fail(WorkerLostError("no summary"))
        self._tokens = []
        return self._finished

    def close(self) -> None:
        """Give up the rest: a sequence that has not ended is cancelled at the worker. Idempotent."""
        self._is_closed = True
        self._waits.end(self._late)
        if not self._is_ended:
            self._client.cancel(self.request_id, wants_summary=False)
        self._client.forget(self.request_id)

    def take(self, output: worker_pb2.SequenceOutput) -> None:
        """Add what the worker sent."""
        if self._is_ended:
            return
        self._tokens.extend(output.tokens)
        if output.HasField("error"):
            self.fail(error_from_pb(output.error))
        elif output.HasField("finished"):
            self._finished = output.finished
            self._ended()
        elif len(self._tokens) > (most := self._limits.unread_tokens_max):
            self._tokens = []
            self._abandon(UnreadError(f"the client left more than {most} tokens unread"))
        self._tell()

    def fail(self, error: BatonError) -> None:
        """End the stream, unless it has ended."""
        if not self._is_ended:
            self._error = error
            self._ended()
            self._tell()

    def _ended(self) -> None:
        if self.on_end is not None:
            self.on_end(self._finished, len(self._tokens))

    def _tell(self) -> None:
        """Wake who reads: at once for the first outputs, with a turn for all others."""
        if not self._has_begun:
            self._changed.set()
        elif not self._waits_for_turn:
            self._waits_for_turn = True
            self._turns.ask(self._go)

    def _go(self) -> bool:
        self._waits_for_turn = False
        self._changed.set()
        return not self._is_closed

    def _late(self) -> None:
        self._abandon(DeadlineError(f"no token came for {self._limits.token_wait_s:g} s"))

    def _abandon(self, error: BatonError) -> None:
        """End the stream, and the sequence at the worker."""
        self._client.cancel(self.request_id, wants_summary=False)
        self.fail(error)

    @property
    def _is_ended(self) -> bool:
        return self._finished is not None or self._error is not None


class DecodeClient:
    """The session with one decode worker. When it breaks, all its streams fail at once and it is of no more use."""

    def __init__(self, worker_id: str, address: str, gateway_id: str, turns: Turns, waits: Waits) -> None:
        self.is_open = True
        """False: it has failed its streams and would never serve another."""
        self._worker_id = worker_id
        self._turns = turns
        self._waits = waits
        self._channel = open_channel(address)
        attach = worker_pb2.DecodeCommand(attach=worker_pb2.Attach(gateway_id=gateway_id))
        self._outbox = Outbox(_OUTBOX_MAX, attach, _together)
        self._streams: dict[str, SequenceStream] = {}
        stub: worker_pb2_grpc.DecodeAsyncStub = worker_pb2_grpc.DecodeStub(self._channel)
        self._call: Any = stub.Session(self._outbox)  # its type is generic in ways that cannot be named

    def start(self, request: worker_pb2.StartRequest, limits: StreamLimits) -> SequenceStream:
        """Start a sequence under an id that no other one has."""
        assert request.request_id not in self._streams
        stream = SequenceStream(self, request.request_id, limits, self._turns, self._waits)
        self._streams[request.request_id] = stream
        self._send(worker_pb2.DecodeCommand(start=request))
        return stream

    def cancel(self, request_id: str, wants_summary: bool) -> None:
        """Ask the worker to end a sequence."""
        cancel = worker_pb2.CancelRequest(request_id=request_id, wants_summary=wants_summary)
        self._send(worker_pb2.DecodeCommand(cancel=cancel))

    def forget(self, request_id: str) -> None:
        """Drop what may still come for a sequence."""
        self._streams.pop(request_id, None)

    async def run(self) -> None:
        """Hand out what the worker sends, until the session breaks or this is cancelled."""
        reason = "it ended the session"
        try:
            async for step in self._call:
                for output in step.outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:  # else: it was cancelled while this was under way
                        stream.take(output)
        except grpc.aio.AioRpcError as error:
            reason = error_from_rpc(error).message
        except asyncio.CancelledError:
            reason = "the gateway stops"
            raise
        finally:
            self._fail_all(reason)
            self._outbox.close()
            self._call.cancel()
            await self._channel.close(None)

    def _fail_all(self, reason: str) -> None:
        self.is_open = False
        streams, self._streams = self._streams, {}
        log(
            _LOG,
            logging.INFO if not streams else logging.WARNING,
            f"session ended: {reason}",
            worker_id=self._worker_id,
            sequences=len(streams),
        )
        for stream in streams.values():
            stream.fail(SessionLostError(f"decode worker {self._worker_id} was lost: {reason}"))

    def _send(self, command: worker_pb2.DecodeCommand) -> None:
        if not self._outbox.put(command):
            self._call.cancel()  # a worker that does not read is lost; `run` tells the streams


def _together(commands: Sequence[worker_pb2.DecodeCommand]) -> worker_pb2.DecodeCommand:
    return worker_pb2.DecodeCommand(batch=worker_pb2.DecodeCommandBatch(commands=commands))


class DecodeClients:
    """A session for each decode worker in use; opened when needed, dropped when it breaks."""

    def __init__(self, gateway_id: str, limits: StreamLimits) -> None:
        self._gateway_id = gateway_id
        self._limits = limits
        self._turns = Turns(_TURNS_AT_ONCE)
        self._waits = Waits(limits.token_wait_s)
        self._clients: dict[tuple[str, str], DecodeClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, worker_id: str, address: str, request: worker_pb2.StartRequest) -> SequenceStream:
        """Start a sequence on a worker; an unreachable one is told by the stream."""
        key = (worker_id, address)
        client = self._clients.get(key)
        if client is None or not client.is_open:
            client = self._clients[key] = DecodeClient(worker_id, address, self._gateway_id, self._turns, self._waits)
            task = asyncio.create_task(client.run(), name=f"decode session {worker_id}")
            self._tasks.add(task)
            task.add_done_callback(self._ended(key, client))
        return client.start(request, self._limits)

    async def close(self) -> None:
        """End all sessions; their streams fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, key: tuple[str, str], client: DecodeClient) -> Callable[[asyncio.Task[None]], None]:
        def forget(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._clients.get(key) is client:
                del self._clients[key]

        return forget
