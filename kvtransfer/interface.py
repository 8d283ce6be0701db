"""What callers see of a transfer: the two halves of an endpoint as protocols, and the reports at their ends.

`kvtransfer.endpoint` moves blocks between processes; `kvtransfer.fake` does the same inside one, for tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_pb.v1 import transfer_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class LandingReport:
    """What a complete landing took: the time runs from the sender's Open to the last verified piece."""

    transport: str
    num_bytes: int
    seconds: float
    moving_s: float = 0.0
    """Of these, with a piece under way: announced, and not yet in place and verified."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a complete push took: the time runs from Open to the receiver's confirmation."""

    transport: str
    num_bytes: int
    seconds: float


class Landing(Protocol):
    """The receiver's side of one ticket. Its blocks may be read, reused or released only after `landed` or `abort`."""

    @property
    def ticket(self) -> transfer_pb2.Ticket:
        """The right to fill the landing blocks, for the sender."""
        ...

    async def landed(self) -> LandingReport:
        """Wait until every piece is in place and verified and the sender has said that none follows.

        Raises:
            TransferError: aborted, a wrong checksum, an incomplete push, the lease ran out, or the sender is lost.
                The blocks are still reserved: call `abort`.
        """
        ...

    async def abort(self, reason: str) -> None:
        """Give up, and return when quiet: no byte can arrive in the blocks any more.

        Safe at any moment, any number of times; after `landed` it does nothing.
        """
        ...


class Push(Protocol):
    """The sender's side of one ticket. Source blocks stay allocated until `finish` or `abort` has returned."""

    @property
    def transport(self) -> str:
        """How the bytes travel: "shm", "ucx", "tcp", "nccl" (or "fake")."""
        ...

    def announce(self, first: int, block_ids: Sequence[int], layers: range | None = None) -> None:
        """Say that source blocks are final. Never blocks; does nothing once the push has failed or was aborted.

        Args:
            first: index into the ticket's landing blocks of the first of `block_ids`.
            block_ids: blocks of the sender's pool, one for each landing block from `first`.
            layers: which layers of them, in model order; None: all of the ticket.
        """
        ...

    async def finish(self) -> PushReport:
        """Say that no piece follows, and wait until the receiver has confirmed them all.

        Raises:
            TransferError: the receiver gave up or refused a piece, or made no progress in time.
            WorkerLostError: the receiver is gone.
            The source blocks are still reserved: call `abort`.
        """
        ...

    async def abort(self, reason: str) -> None:
        """Give up, and return when quiet: nobody reads the source blocks any more.

        Safe at any moment, any number of times; after `finish` it does nothing.
        """
        ...


class Endpoint(Protocol):
    """All transfers of one worker. Owned by the worker's asyncio loop."""

    @property
    def address(self) -> transfer_pb2.TransferAddress:
        """Where other workers reach this one; part of the handshake and of each ticket."""
        ...

    @property
    def slow_paths(self) -> Sequence[str]:
        """What moves more slowly than it could on this machine, each with its reason; empty: nothing."""
        ...

    def grant(self, block_ids: Sequence[int], first_block: int) -> Landing:
        """Make a ticket for reserved blocks of the own pool.

        Args:
            block_ids: the landing blocks in token order; may be empty.
            first_block: index in the prompt of the block that goes into `block_ids[0]`.
        """
        ...

    async def open_push(self, ticket: transfer_pb2.Ticket, ready: Sequence[int] = ()) -> Push:
        """Connect to the ticket's receiver, or reuse a connection, and begin.

        Args:
            ticket: the right to fill its landing blocks.
            ready: blocks for the first of them that are final already, as in `Push.announce(0, ready)`: where the
                receiver reads them itself, it begins one exchange of messages earlier.

        Raises:
            MismatchError: the two pools do not hold the same kind of blocks.
            TransferError: the receiver does not know the ticket, or has used or dropped it.
            WorkerLostError: the receiver cannot be reached.
        """
        ...

    def stats(self) -> list[worker_pb2.TransferStats]:
        """Return what was moved since the start, one entry for each peer and transport."""
        ...

    @property
    def num_active(self) -> int:
        """Landings and pushes alive; 0 at rest."""
        ...

    async def close(self) -> None:
        """End every transfer and connection. Returns when nothing touches the pool any more."""
        ...
