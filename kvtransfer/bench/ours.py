"""Baton's own endpoints, over each transport."""

import asyncio
import random
import time
from typing import Any

from baton_pb.v1 import transfer_pb2
from common.config import PrefillConfig, TransferConfig
from common.errors import BatonError, ConfigError
from kvtransfer.bench.contender import Side, Unavailable
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.interface import Landing, Push

HOST = "127.0.0.1"
STORM_TRANSFERS = 1000
STORM_ABORTED = 0.2
NUM_GROUPS, LAYER_S = PrefillConfig().layer_groups, 0.002
"""How a prefill worker pushes the last chunk of a prompt: its layers in so many groups, as they are computed."""
PLAIN = "plain"
"""In the option, after the transport: without checksums."""


class Ours:
    """Implements `Contender`: grant, push, land. The option is a transport, or e.g. "tcp,plain"."""

    is_shared = True

    def __init__(self, side: Side, option: str) -> None:
        self._side = side
        self._transport, _, plain = option.partition(",")
        self._has_checksums = plain != PLAIN
        self._endpoint: TransferEndpoint
        self.parts: dict[str, float] = {}
        """Of the last fetch, seconds until its ticket was shown, and with pieces under way; the rest are messages."""

    async def connect(self) -> None:
        """Open the endpoint; the connection is made by the first transfer."""
        side = self._side
        config = TransferConfig.model_validate(
            {"transport": self._transport, "codec": "raw", "checksum": self._has_checksums}
        )
        name = "sender" if side.is_sender else "receiver"
        try:
            self._endpoint = await TransferEndpoint.start(name, HOST, side.pool.store, config)
        except ConfigError as error:
            raise Unavailable(str(error)) from error

    async def serve(self, order: Any) -> None:
        """Push what was ordered."""
        if "storm" in order:
            await self._push_storm(order["storm"])
            return
        step = order["layers_together"]
        push = await self._endpoint.open_push(_ticket(order["ticket"]), [] if step else self._side.blocks)
        if step:
            num_layers = self._side.work.layout.num_layers
            for begin in range(0, num_layers, step):
                if order["layer_s"]:  # else all are there at once, and layers that wait together travel together
                    await asyncio.sleep(order["layer_s"] * step)
                push.announce(0, self._side.blocks, range(begin, min(begin + step, num_layers)))
        await push.finish()

    async def fetch(self, by_layer: bool) -> None:
        """Grant a ticket and wait until it has landed."""
        await self._fetch(1 if by_layer else 0, 0.0)

    async def stream(self) -> None:
        """Do the same while the sender announces layers at the pace of a forward pass, as a prefill worker does."""
        await self._fetch(-(-self._side.work.layout.num_layers // NUM_GROUPS), LAYER_S)

    async def _fetch(self, layers_together: int, layer_s: float) -> None:
        begun = time.perf_counter()
        landing = self._endpoint.grant(self._side.blocks, 0)
        ticket = landing.ticket.SerializeToString().hex()
        self._side.link.send({"ticket": ticket, "layers_together": layers_together, "layer_s": layer_s})
        report = await landing.landed()
        asking = time.perf_counter() - begun - report.seconds
        self.parts = {"asking": asking, "moving": report.moving_s, "messages": report.seconds - report.moving_s}

    async def storm(self) -> dict[str, Any]:
        """Receiver: many transfers at once, of which some are given up by either side at random moments.

        Returns:
            seconds of each that landed, and what went wrong.
        """
        side, rng = self._side, random.Random(11)
        size = len(side.blocks) // STORM_TRANSFERS
        landings = [self._endpoint.grant(side.blocks[i * size : (i + 1) * size], 0) for i in range(STORM_TRANSFERS)]
        begun = time.perf_counter()
        side.link.send({"storm": [landing.ticket.SerializeToString().hex() for landing in landings]})
        ends = await asyncio.gather(*(_land(landing, begun, rng) for landing in landings))
        sender = await side.link.receive()
        landed = sorted(seconds for seconds in ends if isinstance(seconds, float))
        errors = [end for end in ends if isinstance(end, str)] + sender["errors"]
        return {"landed": landed, "errors": errors, "left": self._endpoint.num_active + sender["left"]}

    async def close(self) -> None:
        """Close the endpoint."""
        await self._endpoint.close()

    async def _push_storm(self, tickets: list[str]) -> None:
        rng, size = random.Random(12), len(self._side.blocks) // len(tickets)
        pushes = [
            self._push(ticket, self._side.blocks[i * size : (i + 1) * size], rng) for i, ticket in enumerate(tickets)
        ]
        errors = [error for error in await asyncio.gather(*pushes) if error is not None]
        self._side.link.send({"errors": errors, "left": self._endpoint.num_active})

    async def _push(self, ticket: str, blocks: list[int], rng: random.Random) -> str | None:
        """Push, or give up on the way; return what neither side wanted to happen."""
        delay_s = _moment_of_abort(rng)
        try:
            push = await self._endpoint.open_push(_ticket(ticket))
        except BatonError as error:  # the receiver may have given up before it was opened
            return None if _is_wanted(error) else str(error)
        push.announce(0, blocks)
        try:
            await _given_up(push, delay_s) if delay_s is not None else await push.finish()
        except BatonError as error:
            await push.abort("failed")
            return None if _is_wanted(error) else str(error)
        return None


async def _land(landing: Landing, begun: float, rng: random.Random) -> float | str | None:
    """Return the seconds until it landed, None if it was given up by either side, or an error that nobody wanted."""
    delay_s = _moment_of_abort(rng)
    try:
        if delay_s is not None:
            await _given_up(landing, delay_s)
            return None
        await landing.landed()
    except BatonError as error:
        await landing.abort("failed")
        return None if _is_wanted(error) else str(error)
    return time.perf_counter() - begun


async def _given_up(transfer: Landing | Push, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await transfer.abort("given up on purpose")


def _moment_of_abort(rng: random.Random) -> float | None:
    """Each side gives up half of those that are to be aborted, within the time that all of them take."""
    return rng.uniform(0.0, 0.3) if rng.random() < STORM_ABORTED / 2 else None


def _is_wanted(error: BatonError) -> bool:
    return "given up" in str(error)


def _ticket(text: str) -> transfer_pb2.Ticket:
    return transfer_pb2.Ticket.FromString(bytes.fromhex(text))
