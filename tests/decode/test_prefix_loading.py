"""A prefix comes from a tier or from the worker that holds it; what cannot be had is computed, nothing is left."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baton_pb.v1 import worker_pb2
from common.chain_hash import chain_hashes
from common.config import EngineConfig
from common.errors import TransferError
from decode.worker import DecodeWorker
from engine import holder
from engine.fake import FakeEngine, fake_continuation
from prefill.worker import PrefillWorker
from tests.decode.serving import Bench, Gateway, is_at_rest, serving, until_changed

PROMPT = list(range(200, 230))
Worker = PrefillWorker | DecodeWorker


def holder_of(worker: Worker, num_blocks: int = 100) -> worker_pb2.PrefixHolder:
    return worker_pb2.PrefixHolder(worker_id=worker.worker_id, address=worker.address, num_blocks=num_blocks)


def computed(worker: Worker) -> int:
    assert isinstance(worker.engine, FakeEngine)
    return worker.engine.num_computed_tokens


def counters(worker: Worker) -> dict[str, int]:
    return dict(worker.loop.load().counters)


def fetches(worker: Worker) -> worker_pb2.FetchTotals:
    totals = worker.loop.load().fetches
    assert totals is not None
    return totals


async def warm(worker: Worker) -> None:
    """Let a worker compute the prompt, whose blocks it keeps."""
    async with Gateway(worker.address) as gateway:
        await gateway.ask("warm", PROMPT, max_tokens=1)


async def pushes(worker: Worker) -> None:
    """Wait until a worker pushes to another."""
    async with asyncio.timeout(20):
        while not worker.endpoint.num_active:  # noqa: ASYNC110  (no event tells of it)
            await asyncio.sleep(0)


def run(scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as bench:
            await scenario(bench)

    asyncio.run(main())


def test_a_prefill_worker_fetches_what_another_has_computed() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = await bench.prefill("prefill-0"), await bench.prefill("prefill-1")
        async with Gateway((await bench.decode("decode-0")).address) as gateway:
            await gateway.ask("warm", PROMPT, first, max_tokens=1)
        async with Gateway((await bench.decode("decode-1")).address) as gateway:
            answer = await gateway.ask("a", PROMPT, second, holder=holder_of(first), max_tokens=3)

        assert answer.tokens == fake_continuation(PROMPT, 3)
        assert answer.finished is not None
        assert answer.finished.cached_tokens == 28
        assert computed(second) == 2
        assert counters(second)["fetched_tokens_total"] == 28
        totals = fetches(second)
        assert (totals.fetches, totals.tokens, totals.failed_tokens) == (1, 28, 0)
        assert totals.seconds > 0
        assert sorted(bench.network.num_ready) == [0, 0, 7]  # a fetch saves an exchange: all it brings is final already

    run(scenario)


def test_the_next_turn_finds_the_answer_that_the_decode_worker_wrote() -> None:
    async def scenario(bench: Bench) -> None:
        prefill, decode = await bench.prefill(), await bench.decode()
        async with Gateway(decode.address) as gateway:
            told = (await gateway.ask("turn-1", PROMPT, prefill, max_tokens=12)).tokens
            conversation = [*PROMPT, *told, 7, 8, 9]
            before = computed(prefill)
            answer = await gateway.ask("turn-2", conversation, prefill, holder=holder_of(decode, 10), max_tokens=2)

        assert answer.tokens == fake_continuation(conversation, 2)
        assert computed(prefill) - before == len(conversation) - 40  # 41 tokens had KV, 10 full blocks

    run(scenario)


def test_a_worker_that_prefills_for_itself_fetches_too() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = await bench.decode("both-0"), await bench.decode("both-1")
        await warm(first)
        async with Gateway(second.address) as gateway:
            answer = await gateway.ask("a", PROMPT, holder=holder_of(first), max_tokens=3)

        assert answer.tokens == fake_continuation(PROMPT, 3)
        assert answer.finished is not None
        assert answer.finished.cached_tokens == 28
        assert computed(second) == 2 + 2

    run(scenario)


async def _evicted(first: Worker, bench: Bench) -> worker_pb2.PrefixHolder:
    first.engine.pool.release(first.engine.pool.allocate(first.engine.pool.num_blocks))
    return holder_of(first)


async def _gone(first: Worker, bench: Bench) -> worker_pb2.PrefixHolder:
    bench.workers.remove(first)
    await first.stop(0.0)
    return holder_of(first)


async def _unreachable(first: Worker, bench: Bench) -> worker_pb2.PrefixHolder:
    bench.network.open_errors.append(TransferError("no way there"))
    return holder_of(first)


async def _breaks(first: Worker, bench: Bench) -> worker_pb2.PrefixHolder:
    bench.network.piece_errors.append(TransferError("cut in the middle"))
    return holder_of(first)


@pytest.mark.parametrize("trouble", [_evicted, _gone, _unreachable, _breaks])
def test_what_cannot_be_fetched_is_computed(
    trouble: Callable[[Worker, Bench], Awaitable[worker_pb2.PrefixHolder]],
) -> None:
    async def scenario(bench: Bench) -> None:
        first, second = await bench.decode("both-0"), await bench.decode("both-1")
        await warm(first)
        troubled = await trouble(first, bench)
        async with Gateway(second.address) as gateway:
            answer = await gateway.ask("a", PROMPT, holder=troubled, max_tokens=3)

        assert answer.tokens == fake_continuation(PROMPT, 3)
        assert computed(second) == 30 + 2
        assert counters(second)["prefix_fetches_failed_total"] == 1
        totals = fetches(second)
        assert (totals.fetches, totals.tokens, totals.failed_tokens) == (0, 0, 28)
        assert totals.failed_seconds > 0

    run(scenario)


def test_a_holder_that_pushes_to_as_many_as_it_may_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "FETCHES_MAX", 1)

    async def scenario(bench: Bench) -> None:
        first, second, third = [await bench.decode(f"both-{i}") for i in range(3)]
        await warm(first)
        bench.network.hold()
        async with Gateway(second.address) as waiting, Gateway(third.address) as refused:
            await waiting.start("a", PROMPT, holder=holder_of(first), max_tokens=3)
            await pushes(first)

            answer = await refused.ask("b", PROMPT, holder=holder_of(first), max_tokens=3)

            assert answer.tokens == fake_continuation(PROMPT, 3)
            assert computed(third) == 30 + 2
            assert not waiting.answers["a"].tokens  # its fetch is still under way
            bench.network.flow()
            (late,) = await waiting.over("a")
        assert late.tokens == fake_continuation(PROMPT, 3)
        assert computed(second) == 2 + 2

    run(scenario)


def test_what_is_being_fetched_stays_however_little_room_its_holder_has() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = await bench.decode("both-0"), await bench.decode("both-1")
        await warm(first)
        async with Gateway(second.address) as gateway:
            bench.network.hold()
            await gateway.start("a", PROMPT, holder=holder_of(first), max_tokens=3)
            await pushes(first)
            pool = first.engine.pool
            others = pool.allocate(pool.num_available)
            assert len(others) == pool.num_blocks - 28 // first.engine.block_tokens
            bench.network.flow()
            (answer,) = await gateway.over("a")
            pool.release(others)

        assert answer.tokens == fake_continuation(PROMPT, 3)
        assert computed(second) == 2 + 2

    run(scenario)


def test_a_fetch_never_takes_more_than_half_of_what_is_available() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = await bench.decode("both-0"), await bench.decode("both-1", num_blocks=12)
        await warm(first)
        async with Gateway(second.address) as gateway:
            answer = await gateway.ask("a", PROMPT, holder=holder_of(first), max_tokens=3)

        assert answer.tokens == fake_continuation(PROMPT, 3)
        assert counters(second)["prefix_fetches_failed_total"] == 1
        assert fetches(second).failed_tokens == 0  # nobody was asked

    run(scenario)


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_request_that_is_cancelled_while_its_prefix_comes_leaves_nothing(is_remote: bool) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.decode("both-0")
        await warm(first)
        prefill = await bench.prefill() if is_remote else None
        second = await bench.decode("both-1")
        async with Gateway(second.address) as gateway:
            bench.network.hold()
            await gateway.start("a", PROMPT, prefill, holder=holder_of(first), max_tokens=3)
            await until_changed(prefill or second, lambda: (prefill or second).endpoint.num_active > 0)
            await gateway.cancel("a")
            await until_changed(second, lambda: not second.loop.load().waiting_sequences)
            bench.network.flow()
            other = await gateway.ask("b", [1, 2, 3], prefill, max_tokens=2)

        assert other.tokens == fake_continuation([1, 2, 3], 2)
        assert fetches(prefill or second).failed_tokens == 28

    run(scenario)


def test_others_are_served_while_a_prefix_is_on_its_way() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = await bench.decode("both-0"), await bench.decode("both-1")
        await warm(first)
        async with Gateway(second.address) as gateway:
            bench.network.hold()
            await gateway.start("a", PROMPT, holder=holder_of(first), max_tokens=3)
            other = await gateway.ask("b", [1, 2, 3], max_tokens=2)
            assert not gateway.answers["a"].tokens
            bench.network.flow()
            (answer,) = await gateway.over("a")

        assert other.tokens == fake_continuation([1, 2, 3], 2)
        assert answer.tokens == fake_continuation(PROMPT, 3)

    run(scenario)


@pytest.mark.parametrize("is_remote", [True, False])
@pytest.mark.parametrize("sizes", [{"host_tier_mib": 1}, {"disk_tier_mib": 1}])
def test_what_the_pool_evicted_comes_back_from_a_tier(tmp_path: Path, sizes: dict[str, int], is_remote: bool) -> None:
    async def scenario(bench: Bench) -> None:
        bench.tiers = EngineConfig.model_validate({**sizes, "disk_tier_dir": tmp_path, "tier_codec": "raw"})
        worker: Worker = await bench.prefill() if is_remote else await bench.decode()
        asked = await bench.decode("decode-1") if is_remote else worker
        target = worker if isinstance(worker, PrefillWorker) else None
        async with Gateway(asked.address) as gateway:
            await gateway.ask("cold", PROMPT, target, max_tokens=1)
            for emptied in {worker, asked}:
                await until_changed(emptied, lambda emptied=emptied: is_at_rest(emptied))  # type: ignore[misc]
                emptied.engine.pool.release(emptied.engine.pool.allocate(emptied.engine.pool.num_blocks))
            assert worker.engine.tiers is not None
            assert worker.engine.tiers.peek(chain_hashes(PROMPT, 4)) == 7
            answer = await gateway.ask("again", PROMPT, target, max_tokens=3)

        assert answer.tokens == fake_continuation(PROMPT, 3)
        assert answer.finished is not None
        assert answer.finished.cached_tokens == 28
        assert counters(worker)["tier_blocks_restored_total"] == 7

    run(scenario)
