"""The sending half of an endpoint: any number of pushes, over one connection to each receiver."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from baton_pb.v1 import transfer_pb2
from common.errors import TransferError, WorkerLostError
from kvtransfer.outbound import Greeter, OutboundPeer
from kvtransfer.push import BlockPush
from kvtransfer.ticket import TicketTerms, read_ticket

logger = logging.getLogger(__name__)


class Dialer(Protocol):
    """Makes connections to receivers by the transport that fits."""

    async def dial(self, address: transfer_pb2.TransferAddress, greeter: Greeter) -> OutboundPeer:
        """Connect and shake hands.

        Raises:
            WorkerLostError: not reachable.
            MismatchError: no transport in common, or another layout.
        """
        ...


class Sender:
    """All pushes of one worker. Owned by its loop."""

    def __init__(self, greeter: Greeter, dialer: Dialer, connect_timeout_s: float) -> None:
        self._greeter = greeter
        self._dialer = dialer
        self._connect_timeout_s = connect_timeout_s
        self._peers: dict[tuple[str, int], OutboundPeer] = {}
        self._dialing: dict[tuple[str, int], asyncio.Task[OutboundPeer]] = {}
        self._pushes: set[BlockPush] = set()
        self._is_closed = False

    @property
    def num_active(self) -> int:
        """Pushes whose source may still be read, or whose owner has not been told the outcome."""
        return len(self._pushes)

    async def open_push(self, ticket: transfer_pb2.Ticket, ready: Sequence[int] = ()) -> BlockPush:
        """Begin to use a ticket; see `Endpoint.open_push`."""
        terms = read_ticket(ticket, self._greeter.pool.layout)
        key = (ticket.receiver.worker_id, ticket.receiver.generation)
        was_connected = key in self._peers
        try:
            return await self._open(ticket, terms, ready)
        except WorkerLostError as error:
            if not was_connected or isinstance(error, TransferError):
                raise
        return await self._open(
            ticket, terms, ready
        )  # an idle connection may have ended just now: once more on a new one

    def ping(self, now: float, idle_s: float, dead_s: float) -> None:
        """Keep connections alive that said nothing for `idle_s`; end those that heard nothing for `dead_s`."""
        for peer in list(self._peers.values()):
            peer.ping(now, idle_s, dead_s)

    async def close(self) -> None:
        """End every push and connection; returns when nothing reads the pool."""
        self._is_closed = True
        for task in list(self._dialing.values()):
            task.cancel()
        if self._dialing:
            await asyncio.wait(list(self._dialing.values()))
        pushes = list(self._pushes)
        for push in pushes:
            push.fail(TransferError("the sender closes"))
        for peer in list(self._peers.values()):
            peer.lose(TransferError("the sender closes"))
        for push in pushes:
            await push.abort("the sender closes")

    async def _open(self, ticket: transfer_pb2.Ticket, terms: TicketTerms, ready: Sequence[int]) -> BlockPush:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                peer = await self._peer(ticket.receiver)
                push = peer.begin(terms, ticket.block_ids, ready)
                self._pushes.add(push)
                push.on_over = partial(self._pushes.discard, push)
                try:
                    await push.opened()
                except BaseException:
                    push.fail(TransferError("the push was given up while it was being opened"))
                    push.on_over()
                    raise
        except TimeoutError as error:
            raise WorkerLostError(
                f"{ticket.receiver.worker_id} did not answer within {self._connect_timeout_s} s"
            ) from error
        return push

    async def _peer(self, address: transfer_pb2.TransferAddress) -> OutboundPeer:
        """Return the connection to this life of the receiver; callers at the same time share one attempt."""
        if self._is_closed:
            raise TransferError("the sender is closed")
        key = (address.worker_id, address.generation)
        if (peer := self._peers.get(key)) is not None:
            return peer
        if (task := self._dialing.get(key)) is None:
            task = self._dialing[key] = asyncio.create_task(self._dial(address, key))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise TransferError("the sender closes") from None
            raise

    async def _dial(self, address: transfer_pb2.TransferAddress, key: tuple[str, int]) -> OutboundPeer:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                peer = await self._dialer.dial(address, self._greeter)
        except TimeoutError as error:
            raise WorkerLostError(f"{address.worker_id} did not answer within {self._connect_timeout_s} s") from error
        finally:
            del self._dialing[key]
        if peer.lost_by is not None:
            raise peer.lost_by
        self._peers[key] = peer
        peer.on_lost = lambda: self._peers.pop(key, None)
        return peer
