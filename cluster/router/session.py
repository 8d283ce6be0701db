"""One gateway's session with the router: its reservations, and the replies that it has not read yet."""

import asyncio
from functools import partial

from baton_pb.v1 import router_pb2
from cluster.router.front import Front
from cluster.router.messages import asked_from_pb, placement_to_pb
from cluster.router.placement import Reservation
from common.errors import BatonError, InvalidRequestError, OverloadedError
from common.status import error_to_pb

UNREAD_MAX = 4096
"""Replies that wait for a gateway that does not read; one so far behind loses its session."""

_BATCH_MAX = 256
"""Replies in one message; each has a few hundred bytes."""


class GatewaySession:
    """Owned by the router's loop. Plain functions but for `next_reply`; `close` releases everything."""

    def __init__(self, front: Front, number: int) -> None:
        """Begin.

        Args:
            front: where to ask.
            number: of this session; no two are alike.
        """
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the session must end."""
        self.broken.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._front = front
        self._number = number
        self._reservations: dict[str, Reservation] = {}
        self._waiting: set[str] = set()
        self._replies: asyncio.Queue[router_pb2.RouterReply] = asyncio.Queue(UNREAD_MAX)

    def take(self, command: router_pb2.RouterCommand) -> None:
        """Carry out a command.

        Raises:
            InvalidRequestError: it makes no sense; the session must end.
        """
        match command.WhichOneof("command"):
            case "place":
                self._place(command.place)
            case "first_token":
                if reservation := self._get(command.first_token.reservation_id):
                    reservation.first_token()
                    self._front.pump()
            case "release":
                self._release(command.release)
            case "hold":
                self._hold(command.hold)
            case "batch":
                for one in command.batch.commands:
                    self.take(one)
            case "attach" | None:
                raise InvalidRequestError("a session attaches once, and knows place, first_token, release and hold")

    def send(self, reply: router_pb2.RouterReply) -> None:
        """Queue a reply; a gateway that has left UNREAD_MAX of them unread loses its session."""
        try:
            self._replies.put_nowait(reply)
        except asyncio.QueueFull:
            if not self.broken.done():
                self.broken.set_exception(OverloadedError(f"{UNREAD_MAX} replies are unread"))

    async def next_reply(self) -> router_pb2.RouterReply:
        """Wait for something to send; replies that have come together go together."""
        first = await self._replies.get()
        if self._replies.empty():
            return first
        replies = [first]
        while not self._replies.empty() and len(replies) < _BATCH_MAX:
            replies.append(self._replies.get_nowait())
        return router_pb2.RouterReply(batch=router_pb2.RouterReplyBatch(replies=replies))

    def close(self) -> None:
        """Withdraw what waits, and release what the gateway has not released."""
        for reservation_id in self._waiting:
            self._front.withdraw(self._key(reservation_id))
        self._waiting.clear()
        for reservation in self._reservations.values():
            reservation.release()
        self._reservations.clear()
        self.broken.cancel()
        self._front.pump()

    def _place(self, request: router_pb2.PlaceRequest) -> None:
        reservation_id = request.reservation_id
        try:
            self._check_new(reservation_id)
            asked = asked_from_pb(request, self._key(reservation_id))
        except BatonError as error:
            self._answer(reservation_id, error)
            return
        if self._front.ask(asked, partial(self._answer, reservation_id)):
            self._waiting.add(reservation_id)
            queued = router_pb2.Queued(wait_max_s=self._front.wait_max_s)
            self.send(router_pb2.RouterReply(reservation_id=reservation_id, queued=queued))

    def _answer(self, reservation_id: str, answer: Reservation | BatonError) -> None:
        self._waiting.discard(reservation_id)
        reply = router_pb2.RouterReply(reservation_id=reservation_id)
        if isinstance(answer, BatonError):
            reply.error.CopyFrom(error_to_pb(answer))
        else:
            assert answer.placement is not None
            self._reservations[reservation_id] = answer
            reply.placement.CopyFrom(placement_to_pb(answer.placement))
        self.send(reply)

    def _release(self, request: router_pb2.ReleaseRequest) -> None:
        reservation_id = request.reservation_id
        if reservation_id in self._waiting:
            self._waiting.discard(reservation_id)
            self._front.withdraw(self._key(reservation_id))
        elif reservation := self._get(reservation_id):
            del self._reservations[reservation_id]
            if request.HasField("output_tokens"):
                self._front.router.finished(request.output_tokens)
            reservation.release(request.transfer_exposed_s if request.HasField("transfer_exposed_s") else None)
            self._front.pump()

    def _hold(self, request: router_pb2.HoldRequest) -> None:
        self._check_new(request.reservation_id)
        self._reservations[request.reservation_id] = self._front.router.hold(
            request.decode_worker_id,
            request.prefill_worker_id if request.HasField("prefill_worker_id") else None,
            request.num_tokens,
            request.max_output_tokens,
            request.is_prefilled,
        )

    def _check_new(self, reservation_id: str) -> None:
        if not reservation_id or reservation_id in self._reservations or reservation_id in self._waiting:
            raise InvalidRequestError(f"a reservation needs an id of its own, got {reservation_id!r}")

    def _get(self, reservation_id: str) -> Reservation | None:
        """Return a reservation. None after a placement was refused, when its gateway gave up before it knew."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            self._front.router.counters["unknown_reservations_total"] += 1
        return reservation

    def _key(self, reservation_id: str) -> str:
        return f"{self._number}/{reservation_id}"
