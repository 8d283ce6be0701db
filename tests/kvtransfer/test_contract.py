"""What holds for every implementation of `Endpoint`: the fake, shared memory and UCX pass the same tests."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import BatonError, MismatchError, TransferError, WorkerLostError
from kvtransfer.fake import SMALL_LAYOUT, FakeBlockStore

WithPair = Callable[[Callable[[Any], object]], None]
MARK = 0xEE


async def transfer(pair: Any, targets: list[int], sources: list[int]) -> None:
    landing = pair.receiver.grant(targets, 0)
    push = await pair.sender.open_push(landing.ticket)
    push.announce(0, sources)
    await push.finish()
    await landing.landed()


def mark(store: FakeBlockStore, blocks: list[int]) -> None:
    """Do what a new owner of the blocks does."""
    for block in blocks:
        store.write(block, bytes([MARK]) * store.layout.block_bytes)


def is_marked(store: FakeBlockStore, blocks: list[int]) -> bool:
    return all(set(store.block(block)) == {MARK} for block in blocks)


def test_bytes_land_in_the_granted_blocks_and_nowhere_else(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        before = [pair.target.block(block) for block in range(16)]
        landing = pair.receiver.grant([3, 4, 5, 11, 0], 7)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [8, 9, 2, 2, 15])

        sent, arrived = await asyncio.gather(push.finish(), landing.landed())

        for target, source in zip([3, 4, 5, 11, 0], [8, 9, 2, 2, 15], strict=True):
            assert pair.target.block(target) == pair.source.block(source)
        untouched = set(range(16)) - {3, 4, 5, 11, 0}
        assert all(pair.target.block(block) == before[block] for block in untouched)
        assert sent.num_bytes == arrived.num_bytes == 5 * SMALL_LAYOUT.block_bytes
        assert sent.transport == arrived.transport == push.transport
        assert pair.sender.num_active == pair.receiver.num_active == 0

    with_pair(test)


def test_pieces_may_come_in_any_order_and_by_layers(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        rng = random.Random(7)
        for _ in range(12):
            count = rng.randint(1, 8)
            targets, sources = rng.sample(range(16), count), rng.choices(range(16), k=count)
            pieces: list[tuple[int, list[int], range | None]] = []
            at = 0
            while at < count:
                step = rng.randint(1, count - at)
                cut = rng.choice([None, 1, 2])
                layers = [None] if cut is None else [range(cut), range(cut, SMALL_LAYOUT.num_layers)]
                pieces += [(at, sources[at : at + step], part) for part in layers]
                at += step
            rng.shuffle(pieces)
            landing = pair.receiver.grant(targets, 0)
            push = await pair.sender.open_push(landing.ticket)

            for first, blocks, part in pieces:
                push.announce(first, blocks, part)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            await push.finish()
            await landing.landed()

            for target, source in zip(targets, sources, strict=True):
                assert pair.target.block(target) == pair.source.block(source)

    with_pair(test)


def test_an_empty_ticket_completes(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([], 4)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [])

        assert (await push.finish()).num_bytes == 0
        assert (await landing.landed()).num_bytes == 0

    with_pair(test)


def test_blocks_that_are_ready_when_a_push_is_opened_arrive_and_further_ones_follow(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        for block in (1, 2, 3):
            pair.source.fill(block, block)
        landing = pair.receiver.grant([7, 6, 5], 0)

        push = await pair.sender.open_push(landing.ticket, [3, 1])
        push.announce(2, [2])
        await asyncio.gather(push.finish(), landing.landed())

        assert [pair.target.block(block) for block in (7, 6, 5)] == [pair.source.block(block) for block in (3, 1, 2)]
        assert pair.sender.num_active == pair.receiver.num_active == 0

    with_pair(test)


def test_a_refused_ticket_with_ready_blocks_leaves_the_connection_of_use_and_no_block_written(
    with_pair: WithPair,
) -> None:
    async def test(pair: Any) -> None:
        await transfer(pair, [7], [8])
        mark(pair.target, [1, 2])
        landing = pair.receiver.grant([1, 2], 0)
        await landing.abort("not wanted any more")

        with pytest.raises(TransferError):
            await pair.sender.open_push(landing.ticket, [3, 4])

        await transfer(pair, [7], [8])
        assert is_marked(pair.target, [1, 2])
        assert pair.sender.num_active == pair.receiver.num_active == 0

    with_pair(test)


@pytest.mark.parametrize("yields", [0, 1, 2, 3, 5, 8, 13])
def test_after_a_receivers_abort_no_byte_arrives_any_more(with_pair: WithPair, yields: int) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1, 2, 3, 4], 0)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [1, 2])
        push.announce(2, [3, 4], range(1))
        push.announce(2, [3, 4], range(1, 3))
        for _ in range(yields):
            await asyncio.sleep(0)

        await landing.abort("the client went away")
        mark(pair.target, [1, 2, 3, 4])

        with pytest.raises(TransferError):
            await push.finish()
        await push.abort("nothing left to do")
        await transfer(pair, [7], [8])  # a round trip later
        assert is_marked(pair.target, [1, 2, 3, 4])
        with pytest.raises(TransferError):
            await landing.landed()
        assert pair.sender.num_active == pair.receiver.num_active == 0

    with_pair(test)


@pytest.mark.parametrize("yields", [0, 1, 2, 3, 5, 8, 13])
def test_after_a_senders_abort_reused_source_blocks_are_never_believed(with_pair: WithPair, yields: int) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1, 2, 3, 4], 0)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [1, 2])
        push.announce(2, [3, 4])
        for _ in range(yields):
            await asyncio.sleep(0)

        await push.abort("the request was cancelled")
        mark(pair.source, [1, 2, 3, 4])

        with pytest.raises(TransferError):
            await landing.landed()
        await landing.abort("failed")
        assert pair.sender.num_active == pair.receiver.num_active == 0

    with_pair(test)


def test_a_ticket_may_be_aborted_before_it_is_opened_and_after_it_has_landed(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        early = pair.receiver.grant([1], 0)
        await early.abort("changed its mind")
        await early.abort("twice")
        with pytest.raises(TransferError):
            await pair.sender.open_push(early.ticket)

        late = pair.receiver.grant([1], 0)
        push = await pair.sender.open_push(late.ticket)
        push.announce(0, [5])
        await push.finish()
        await late.landed()
        await late.abort("too late to matter")
        await push.abort("too late to matter")

        assert pair.target.block(1) == pair.source.block(5)
        assert pair.sender.num_active == pair.receiver.num_active == 0

    with_pair(test)


def test_announcing_after_a_failure_is_harmless(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1, 2], 0)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [1])
        await landing.abort("enough")
        await transfer(pair, [7], [8])

        push.announce(1, [2])

        with pytest.raises(TransferError, match="enough"):
            await push.finish()
        await push.abort("done")

    with_pair(test)


def test_a_ticket_is_good_for_one_push(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1], 0)
        push = await pair.sender.open_push(landing.ticket)

        with pytest.raises(TransferError):
            await pair.sender.open_push(landing.ticket)

        push.announce(0, [1])
        await push.finish()
        await landing.landed()
        with pytest.raises(TransferError):
            await pair.sender.open_push(landing.ticket)

    with_pair(test)


def test_a_wrong_secret_or_id_opens_nothing(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1], 0)
        for field, value in (("secret", bytes(32)), ("transfer_id", bytes(16)), ("secret", b"short")):
            forged = type(landing.ticket)()
            forged.CopyFrom(landing.ticket)
            setattr(forged, field, value)
            with pytest.raises(TransferError):
                await pair.sender.open_push(forged)

        push = await pair.sender.open_push(landing.ticket)  # the right one still does
        push.announce(0, [1])
        await push.finish()
        await landing.landed()

    with_pair(test)


def test_another_layout_is_a_mismatch_that_names_the_difference(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1], 0)
        other = type(landing.ticket)()
        other.CopyFrom(landing.ticket)
        other.layout.block_tokens = 32

        with pytest.raises(MismatchError, match="block_tokens is 4 here and 32 there"):
            await pair.sender.open_push(other)
        await landing.abort("mismatch")

    with_pair(test)


def test_a_push_that_leaves_something_out_fails_at_both_ends(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1, 2], 0)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [1])
        push.announce(1, [2], range(2))

        with pytest.raises(TransferError, match="never sent"):
            await push.finish()
        with pytest.raises(TransferError, match="never sent"):
            await landing.landed()
        await push.abort("failed")
        await landing.abort("failed")

    with_pair(test)


def test_a_block_sent_twice_fails_the_transfer(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1, 2], 0)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [1, 2])
        push.announce(1, [3], range(2, 3))

        with pytest.raises(TransferError, match="twice"):
            await push.finish()
        with pytest.raises(TransferError, match="twice"):
            await landing.landed()
        await push.abort("failed")
        await landing.abort("failed")

    with_pair(test)


def test_many_transfers_at_once_do_not_mix(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        async def one(block: int) -> None:
            for turn in range(4):
                landing = pair.receiver.grant([block], 0)
                push = await pair.sender.open_push(landing.ticket)
                push.announce(0, [(block + turn) % 16], range(1, 3))
                if (block + turn) % 3 == 0:
                    await (landing if block % 2 else push).abort("some do")
                    mark(pair.target, [block] if block % 2 else [])
                    await push.abort("some do")
                    await landing.abort("some do")
                    assert block % 2 == 0 or is_marked(pair.target, [block])
                    continue
                push.announce(0, [(block + turn) % 16], range(1))
                await asyncio.gather(push.finish(), landing.landed())
                assert pair.target.block(block) == pair.source.block((block + turn) % 16)

        await asyncio.gather(*(one(block) for block in range(16)))
        assert pair.sender.num_active == pair.receiver.num_active == 0

    with_pair(test)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_closing_an_endpoint_ends_its_transfers_at_the_other_end(with_pair: WithPair, who: str) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1, 2], 0)
        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [1])

        await getattr(pair, who).close()

        with pytest.raises(WorkerLostError):
            await push.finish()
        with pytest.raises(TransferError):
            await landing.landed()
        await push.abort("over")
        await landing.abort("over")
        assert pair.sender.num_active == pair.receiver.num_active == 0
        with pytest.raises(BatonError):
            await pair.sender.open_push(landing.ticket)

    with_pair(test)


def test_waiting_for_an_outcome_may_be_cancelled_and_taken_up_again(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        landing = pair.receiver.grant([1], 0)
        waiting = asyncio.create_task(landing.landed())
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting

        push = await pair.sender.open_push(landing.ticket)
        push.announce(0, [1])
        await push.finish()
        assert (await landing.landed()).num_bytes == SMALL_LAYOUT.block_bytes

    with_pair(test)


def test_statistics_count_what_was_moved_at_both_ends(with_pair: WithPair) -> None:
    async def test(pair: Any) -> None:
        await transfer(pair, [1, 2], [3, 4])
        await transfer(pair, [1], [3])

        (at_sender,), (at_receiver,) = pair.sender.stats(), pair.receiver.stats()
        assert at_sender.peer_worker_id == "receiver"
        assert at_receiver.peer_worker_id == "sender"
        assert at_sender.bytes == at_receiver.bytes == 3 * SMALL_LAYOUT.block_bytes
        assert at_sender.refusals == at_receiver.refusals == 0

    with_pair(test)
