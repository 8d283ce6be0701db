"""A new connection is measured once, before its first push; a slower one than expected is never used in silence."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from common.config import TransferConfig
from common.errors import MismatchError
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore

MakePair = Callable[..., AbstractAsyncContextManager[Any]]
LARGE = SMALL_LAYOUT._replace(block_tokens=64, head_dim=128)  # 384 KiB a block: worth measuring
UNREACHABLE_MB_S = 1e9


async def transfer(pair: Any, target: int = 1) -> str:
    landing = pair.receiver.grant([target], 0)
    push = await pair.sender.open_push(landing.ticket)
    push.announce(0, [2])
    await push.finish()
    await landing.landed()
    assert pair.target.block(target) == pair.source.block(2)
    return str(push.transport)


def run(make: AbstractAsyncContextManager[Any], test: Callable[[Any], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), make as pair:
            await test(pair)

    asyncio.run(main())


def test_both_ends_know_the_rate_after_the_first_push(make_real_pair: MakePair) -> None:
    async def test(pair: Any) -> None:
        await transfer(pair)
        rates = [entry.probed_bytes_per_s for end in (pair.sender, pair.receiver) for entry in end.stats()]
        assert len(rates) == 2
        assert all(rate > 0 for rate in rates)

        await transfer(pair, 5)

        assert [e.probed_bytes_per_s for end in (pair.sender, pair.receiver) for e in end.stats()] == rates
        (at_sender,) = pair.sender.stats()
        assert at_sender.frames > 4
        assert 0 < at_sender.exposed_seconds <= at_sender.seconds
        untouched = [block for block in range(16) if block not in (1, 5)]
        assert all(set(pair.target.block(block)) == {0} for block in untouched)  # probes go nowhere

    run(make_real_pair(layout=LARGE), test)


def test_a_pool_too_small_to_tell_is_not_measured(make_shm_pair: MakePair) -> None:
    async def test(pair: Any) -> None:
        await transfer(pair)
        (entry,) = pair.sender.stats()
        assert (entry.probed_bytes_per_s, entry.fallbacks) == (0, 0)

    run(make_shm_pair(expected_mb_s=UNREACHABLE_MB_S, on_slow="refuse"), test)


def test_a_slow_pair_is_logged_and_counted(make_real_pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    async def test(pair: Any) -> None:
        await transfer(pair)
        assert [entry.fallbacks for entry in pair.sender.stats()] == [1]

    run(make_real_pair(layout=LARGE, expected_mb_s=UNREACHABLE_MB_S), test)
    assert "SLOW PATH" in caplog.text
    assert "are expected" in caplog.text


def test_a_slow_pair_is_refused_where_the_operator_says_so(make_real_pair: MakePair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1], 0)
        for _ in range(2):
            with pytest.raises(MismatchError, match="are expected"):
                await pair.sender.open_push(landing.ticket)
        assert pair.sender.num_active == 0
        await landing.abort("nobody came")

    run(make_real_pair(layout=LARGE, expected_mb_s=UNREACHABLE_MB_S, on_slow="refuse"), test)


def test_a_slower_transport_than_auto_expects_is_refused_where_the_operator_says_so() -> None:
    async def main() -> None:
        stores = FakeBlockStore(), FakeBlockStore()
        config = TransferConfig(on_slow="refuse")
        sender = await TransferEndpoint.start("sender", "127.0.0.1", stores[0], config)
        receiver = await TransferEndpoint.start("receiver", "127.0.0.1", stores[1], config)
        receiver.address.shm_path = "@baton-in-another-namespace"
        try:
            async with asyncio.timeout(20):
                with pytest.raises(MismatchError, match="shm cannot be used"):
                    await sender.open_push(receiver.grant([1], 0).ticket)
        finally:
            await sender.close()
            await receiver.close()

    asyncio.run(main())
