"""The first announcement after a pause goes out at once; what is announced while it is under way travels together."""

import asyncio

from kvtransfer.fake import SMALL_LAYOUT
from tests.kvtransfer.faulty import faulty_pair

LIMIT_S = 20


def test_an_announcement_waits_for_nothing_but_what_is_under_way() -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), faulty_pair(checksum=False) as pair:
            landing = pair.receiver.grant([3], 0)
            push = await pair.sender.open_push(landing.ticket)

            for layer in range(SMALL_LAYOUT.num_layers):
                push.announce(0, [8], range(layer, layer + 1))

            assert pair.wire.num_bytes == SMALL_LAYOUT.layer_bytes
            await asyncio.gather(push.finish(), landing.landed())
            assert pair.target.block(3) == pair.source.block(8)
            assert sum(entry.pieces for entry in pair.receiver.stats()) == 2

    asyncio.run(test())
