"""Windows bound what is under way; a slow or dead peer uses up its own, and holds up nobody else."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from common.config import TransferConfig
from common.errors import ConfigError, OverloadedError
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore
from kvtransfer.windows import Windows
from tests.kvtransfer.faulty import FaultyEndpoint, FaultyNetwork, faulty_pair

LIMIT_S = 20
SOURCES, TARGETS = [8, 9, 2, 15], [3, 4, 11, 0]
WINDOW = 2 * SMALL_LAYOUT.block_bytes


def run(test: Callable[[], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(main())


async def transfer(sender: FaultyEndpoint, receiver: FaultyEndpoint, source: int, target: int) -> None:
    landing = receiver.grant([target], 0)
    push = await sender.open_push(landing.ticket)
    push.announce(0, [source])
    await asyncio.gather(push.finish(), landing.landed())


def test_windows_bound_what_senders_have_under_way() -> None:
    async def test() -> None:
        async with faulty_pair(codec="int8", inflight_bytes_max=2 * SMALL_LAYOUT.block_bytes) as pair:
            held: list[bytes] = []
            two = asyncio.Event()

            def hold(message: bytes) -> None:
                held.append(message)
                if len(held) == 2:
                    two.set()

            pair.wire.damage = hold
            landing = pair.receiver.grant(TARGETS, 0)
            push = await pair.sender.open_push(landing.ticket)
            for index, block in enumerate(SOURCES):
                push.announce(index, [block])
            await two.wait()
            other = pair.receiver.grant([7], 0)
            other_push = await pair.sender.open_push(other.ticket)  # a round trip later
            other_push.announce(0, [7])
            assert len(held) == 2
            pair.wire.damage = lambda message: message  # of what waits for the window, some may still be sent
            pair.wire.cut()  # what was held never arrives
            for transfer in (other_push, push, landing, other):  # first the one that would have its turn next
                await transfer.abort("over")
            assert pair.num_refusals == 0

    run(test)


@pytest.mark.parametrize("mode", [{}, {"codec": "int8", "sealed": True}])
@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_a_peer_that_is_stuck_delays_no_other(mode: dict[str, Any], who: str) -> None:
    """It has used up its window; a hundred transfers of another pass meanwhile."""

    async def test() -> None:
        network = FaultyNetwork()
        config = TransferConfig.model_validate({"lease_s": 2 * LIMIT_S, "inflight_bytes_max": WINDOW, **mode})
        shared, stuck, other = (FaultyEndpoint(network, name, FakeBlockStore(16), config) for name in "abc")
        sender, receiver = (shared, stuck) if who == "receiver" else (stuck, shared)
        network.wire(*("ab" if who == "receiver" else "ba")).is_held = True
        landing = receiver.grant(TARGETS, 0)
        push = await sender.open_push(landing.ticket)
        for index, block in enumerate(SOURCES):
            push.announce(index, [block])
        try:
            for number in range(100):
                pair = (shared, other) if who == "receiver" else (other, shared)
                await transfer(*pair, number % 16, 7)
            assert not push.is_over

            network.wire(*("ab" if who == "receiver" else "ba")).flow()
            await asyncio.gather(push.finish(), landing.landed())
        finally:
            for endpoint in (shared, stuck, other):
                await endpoint.close()

    run(test)


def test_a_lost_peers_window_comes_back() -> None:
    async def test() -> None:
        network = FaultyNetwork()
        config = TransferConfig(staging_bytes_max=64 << 20, inflight_bytes_max=40 << 20)
        receiver = FaultyEndpoint(network, "receiver", FakeBlockStore(16), config)
        for life in range(30):  # each takes the smallest window, 8 MiB, of 64
            sender = FaultyEndpoint(network, f"sender-{life}", FakeBlockStore(16), config)
            await transfer(sender, receiver, 1, 2)
            await sender.close()
            await asyncio.sleep(0)
        await receiver.close()

    run(test)


def test_a_sender_for_which_no_memory_is_left_is_refused_with_the_reason() -> None:
    async def test() -> None:
        network = FaultyNetwork()
        config = TransferConfig(staging_bytes_max=64 << 20, inflight_bytes_max=40 << 20)
        receiver = FaultyEndpoint(network, "receiver", FakeBlockStore(16), config)
        senders = [FaultyEndpoint(network, f"sender-{n}", FakeBlockStore(16), config) for n in range(9)]
        for sender in senders[:8]:
            await transfer(sender, receiver, 1, 2)
        landing = receiver.grant([1], 0)
        with pytest.raises(OverloadedError, match="staging_bytes_max"):
            await senders[8].open_push(landing.ticket)
        await landing.abort("refused")
        await transfer(senders[0], receiver, 1, 2)
        for endpoint in (*senders, receiver):
            await endpoint.close()

    run(test)


def test_less_memory_than_one_window_is_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match="staging_bytes_max"):
        Windows(64 << 20, 128 << 20, 100 << 20)


def test_senders_beyond_the_staging_memory_are_refused_and_windows_come_back() -> None:
    windows = Windows(256 << 20, 64 << 20, 1 << 20)
    granted: list[int] = []
    with pytest.raises(OverloadedError, match="staging_bytes_max"):
        granted.extend(iter(windows.grant, None))
    assert sum(granted) <= 256 << 20
    assert min(granted) == 8 << 20
    assert len(granted) > 20
    for window in granted:
        windows.give_back(window)
    assert windows.grant() == granted[0]
