"""One gateway's session with the router: its reservations, and the replies that it has not read yet."""

import asyncio

from baton_pb.v1 import router_pb2
from cluster.router.messages import placement_to_pb, request_from_pb
from cluster.router.placement import Reservation
from cluster.router.router import Router
from common.errors import BatonError, InvalidRequestError, OverloadedError
from common.status import error_to_pb

UNREAD_MAX = 4096
"""Replies that wait for a gateway that does not read; one so far behind loses its session."""


class GatewaySession:
    """Owned by the router's loop. Plain functions but for `next_reply`; `close` releases everything."""

    def __init__(self, router: Router) -> None:
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the session must end."""
        self.broken.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._router = router
        self._reservations: dict[str, Reservation] = {}
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
            case "release":
                if reservation := self._get(command.release.reservation_id):
                    reservation.release()
                    del self._reservations[command.release.reservation_id]
            case "hold":
                self._hold(command.hold)
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
        """Wait for a reply to send."""
        return await self._replies.get()

    def close(self) -> None:
        """Release what the gateway has not released."""
        for reservation in self._reservations.values():
            reservation.release()
        self._reservations.clear()
        self.broken.cancel()

    def _place(self, request: router_pb2.PlaceRequest) -> None:
        reply = router_pb2.RouterReply(reservation_id=request.reservation_id)
        try:
            self._check_new(request.reservation_id)
            reservation = self._router.place(request_from_pb(request))
        except BatonError as error:
            reply.error.CopyFrom(error_to_pb(error))
        else:
            assert reservation.placement is not None
            self._reservations[request.reservation_id] = reservation
            reply.placement.CopyFrom(placement_to_pb(reservation.placement))
        self.send(reply)

    def _hold(self, request: router_pb2.HoldRequest) -> None:
        self._check_new(request.reservation_id)
        self._reservations[request.reservation_id] = self._router.hold(
            request.decode_worker_id,
            request.prefill_worker_id if request.HasField("prefill_worker_id") else None,
            request.num_tokens,
            request.max_output_tokens,
            request.is_prefilled,
        )

    def _check_new(self, reservation_id: str) -> None:
        if not reservation_id or reservation_id in self._reservations:
            raise InvalidRequestError(f"a reservation needs an id of its own, got {reservation_id!r}")

    def _get(self, reservation_id: str) -> Reservation | None:
        """Return a reservation. None after a placement was refused, when its gateway gave up before it knew."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            self._router.counters["unknown_reservations_total"] += 1
        return reservation
