"""One sequence in a decode worker: its tokens, where it stands, and to whom its tokens go."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from baton_pb.v1 import common_pb2, worker_pb2
from decode.scheduler import Stream
from engine.sequence import Sequence
from engine.step_runner import Work


class StreamSession(Protocol):
    """Whose stream it is: the session of the gateway that started it. Plain functions."""

    streams: "dict[str, TokenStream]"
    """Its streams by request id."""

    def emit(self, output: worker_pb2.SequenceOutput) -> None:
        """Add to what the gateway gets next."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class TokenStream(Stream):
    """A sequence, and what the decode loop knows about it. Times are the loop's clock's, seconds."""

    sequence: Sequence
    session: StreamSession
    started_s: float
    target: worker_pb2.PrefillTarget | None = None
    """Who prefills it, while it `is_remote`."""
    prefix_holder: worker_pb2.PrefixHolder | None = None
    """Who has blocks that the target may lack."""
    loading: Work | None = None
    """Brings blocks of its prefix into the pool."""
    timeout_s: float | None = None
    """From started_s to the deadline."""
    timer: asyncio.TimerHandle | None = None
    """Ends it at its deadline."""
    chunk_started_s: float | None = None
    first_token_s: float | None = None
    joined_s: float | None = None
    second_token_s: float | None = None
    prefill_s: float = 0.0
    prefill_device_s: float = 0.0
    """The prefill worker's share; this worker's is the sequence's."""
    transfer_exposed_s: float = 0.0
    transport: str = "local"

    @classmethod
    def of(
        cls, sequence: Sequence, session: StreamSession, started_s: float, target: worker_pb2.PrefillTarget | None
    ) -> "TokenStream":
        """Return the stream of a sequence that came just now; without a target it is prefilled here."""
        return cls(sequence=sequence, is_remote=target is not None, session=session, started_s=started_s, target=target)

    @property
    def request_id(self) -> str:
        """Names it within its session."""
        return self.sequence.request_id

    def left_s(self, now_s: float) -> float | None:
        """Return the time to its deadline, a little if that has passed; None without one."""
        return None if self.timeout_s is None else max(0.001, self.started_s + self.timeout_s - now_s)

    def finished_pb(self, reason: "common_pb2.FinishReason.ValueType") -> worker_pb2.SequenceFinished:
        """Return the last message's summary."""
        first_decode_s = 0.0
        if self.second_token_s is not None and self.joined_s is not None:
            first_decode_s = self.second_token_s - self.joined_s
        return worker_pb2.SequenceFinished(
            reason=reason,
            cached_tokens=self.cached_tokens or 0,
            prefill_s=self.prefill_s,
            prefill_device_s=self.prefill_device_s + self.sequence.prefill_device_s,
            decode_device_s=self.sequence.decode_device_s,
            transfer_exposed_s=self.transfer_exposed_s,
            first_decode_s=first_decode_s,
            transport=self.transport,
        )
