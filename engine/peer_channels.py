"""Channels to other workers: one for each address, kept while it works."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from common.rpc import open_channel

CHANNELS_MAX = 256
"""Idle channels beyond which the longest unused one is closed."""


@dataclass(slots=True, eq=False)
class PeerChannel:
    """A channel in use. Its user sets `is_lost` when a call has shown that nobody answers there."""

    channel: grpc.aio.Channel
    is_lost: bool = False
    num_uses: int = 0


class PeerChannels:
    """Channels by address. One whose worker was lost is dropped: the next use connects anew."""

    def __init__(self) -> None:
        self._channels: dict[str, PeerChannel] = {}

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[PeerChannel]:
        """Lend the channel to `address`."""
        peer = self._take(address)
        peer.num_uses += 1
        try:
            yield peer
        finally:
            peer.num_uses -= 1
            if peer.is_lost and self._channels.get(address) is peer:
                del self._channels[address]
            idle = [key for key, other in self._channels.items() if not other.num_uses]
            surplus = [self._channels.pop(key) for key in idle[: max(0, len(self._channels) - CHANNELS_MAX)]]
            if not peer.num_uses and peer not in self._channels.values() and peer not in surplus:
                surplus.append(peer)
            for unused in surplus:
                await unused.channel.close(None)

    async def close(self) -> None:
        """Close all channels; their calls are cancelled."""
        peers, self._channels = list(self._channels.values()), {}
        for peer in peers:
            await peer.channel.close(None)

    def _take(self, address: str) -> PeerChannel:
        peer = self._channels.pop(address, None) or PeerChannel(open_channel(address))
        self._channels[address] = peer  # last: the most recently used
        return peer
