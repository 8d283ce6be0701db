"""The fake holds, delays and fails transfers on demand, for the tests of its users."""

import asyncio

import pytest

from common.errors import TransferError, WorkerLostError
from kvtransfer.fake import FakeBlockStore, FakeNetwork


def test_held_pieces_move_only_when_the_network_flows() -> None:
    async def test() -> None:
        network = FakeNetwork()
        sender = network.endpoint("p", FakeBlockStore())
        receiver = network.endpoint("d", FakeBlockStore())
        sender.store.fill(3, 3)
        before = receiver.store.block(1)
        network.hold()
        landing = receiver.grant([1], 0)
        push = await sender.open_push(landing.ticket)
        push.announce(0, [3])
        for _ in range(10):
            await asyncio.sleep(0)
        assert receiver.store.block(1) == before

        network.flow()
        await asyncio.gather(push.finish(), landing.landed())

        assert receiver.store.block(1) == sender.store.block(3)

    asyncio.run(test())


def test_errors_of_opens_and_pieces_are_injected() -> None:
    async def test() -> None:
        network = FakeNetwork()
        sender = network.endpoint("p", FakeBlockStore())
        receiver = network.endpoint("d", FakeBlockStore())
        landing = receiver.grant([1], 0)
        network.open_errors.append(WorkerLostError("injected"))
        with pytest.raises(WorkerLostError, match="injected"):
            await sender.open_push(landing.ticket)

        network.piece_errors.append(TransferError("bit rot"))
        push = await sender.open_push(landing.ticket)
        push.announce(0, [3])

        with pytest.raises(TransferError, match="bit rot"):
            await push.finish()
        with pytest.raises(TransferError, match="bit rot"):
            await landing.landed()
        await push.abort("over")
        await landing.abort("over")
        assert sender.num_active == receiver.num_active == 0

    asyncio.run(test())


def test_a_killed_endpoint_is_lost_to_its_peers() -> None:
    async def test() -> None:
        network = FakeNetwork()
        sender = network.endpoint("p", FakeBlockStore())
        receiver = network.endpoint("d", FakeBlockStore())
        landing = receiver.grant([1], 0)
        push = await sender.open_push(landing.ticket)

        receiver.kill()

        with pytest.raises(WorkerLostError):
            await push.finish()
        with pytest.raises(WorkerLostError, match="cannot reach d"):
            await sender.open_push(landing.ticket)
        await push.abort("over")
        await landing.abort("over")

    asyncio.run(test())
