"""A decode worker serves what the model says, whoever prefilled it, and every request ends once and gives all back."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_pb.v1 import common_pb2, worker_pb2
from common.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    MismatchError,
    NotFoundError,
    OverloadedError,
    TransferError,
    WorkerLostError,
)
from common.rpc import open_channel
from decode.worker import DecodeWorker
from engine.fake import FakeEngine, fake_continuation, fake_layout
from engine.step import ScheduledChunk
from kvtransfer.codecs.base import Slabs
from kvtransfer.codecs.registry import CODECS
from prefill.worker import PrefillWorker
from tests.decode.serving import LIMIT_S, Bench, Gate, Gateway, is_at_rest, serving, until_changed

PROMPT = list(range(100, 130))


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 1000 for i in range(length)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 30])
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_tokens_equal_the_models_cold_and_with_every_prefix_hit(length: int, is_remote: bool) -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill = await bench.prefill(token_budget=7)
            decode = await bench.decode(token_budget=7)
            async with Gateway(decode.address) as gateway:
                want = fake_continuation(prompt_of(length), 9)
                for attempt in ("cold", "warm"):
                    answer = await gateway.ask(attempt, prompt_of(length), prefill if is_remote else None, max_tokens=9)
                    assert answer.tokens == want
                longer = prompt_of(length) + want + [5, 6]
                answer = await gateway.ask("next turn", longer, prefill if is_remote else None, max_tokens=5)
                assert answer.tokens == fake_continuation(longer, 5)
                other = [*prompt_of(length)[:-1], 999]
                answer = await gateway.ask("forked", other, prefill if is_remote else None, max_tokens=5)
                assert answer.tokens == fake_continuation(other, 5)

    asyncio.run(main())


def test_seeded_draws_do_not_depend_on_where_the_sequence_runs() -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill, decode = await bench.prefill(), await bench.decode()
            async with Gateway(decode.address) as gateway:
                want = fake_continuation(PROMPT, 8, seed=5)
                local = await gateway.ask("local", PROMPT, temperature=1.0, seed=5, max_tokens=8)
                remote = await gateway.ask("remote", PROMPT, prefill, temperature=1.0, seed=5, max_tokens=8)
                moved = await gateway.ask(
                    "moved", PROMPT + want[:3], prefill, num_prompt_tokens=30, temperature=1.0, seed=5, max_tokens=8
                )
                moved_here = await gateway.ask(
                    "moved here", PROMPT + want[:5], num_prompt_tokens=30, temperature=1.0, seed=5, max_tokens=8
                )

                assert local.tokens == remote.tokens == want
                assert want[:3] + moved.tokens == want[:5] + moved_here.tokens == want

    asyncio.run(main())


def test_a_moved_sequence_that_had_its_last_token_finishes_at_once() -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode()
            async with Gateway(decode.address) as gateway:
                answer = await gateway.ask("moved", [*PROMPT, 1, 2], num_prompt_tokens=30, max_tokens=2)

                assert answer.tokens == []
                assert answer.finished is not None
                assert answer.finished.reason == common_pb2.FINISH_REASON_LENGTH

    asyncio.run(main())


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_a_stop_token_ends_the_sequence_even_as_its_first_token(is_remote: bool) -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill, decode = await bench.prefill(), await bench.decode()
            tokens = fake_continuation(PROMPT, 3)
            async with Gateway(decode.address) as gateway:
                target = prefill if is_remote else None
                first = await gateway.ask("first", PROMPT, target, stop_token_ids=[tokens[0]])
                third = await gateway.ask("third", PROMPT, target, stop_token_ids=[tokens[2]])

                assert first.tokens == tokens[:1]
                assert third.tokens == tokens
                assert third.finished is not None
                assert third.finished.reason == common_pb2.FINISH_REASON_STOP

    asyncio.run(main())


def test_the_summary_tells_what_prefill_reused_and_how_the_kv_travelled() -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill, decode = await bench.prefill(), await bench.decode()
            async with Gateway(decode.address) as gateway:
                cold = await gateway.ask("cold", PROMPT, prefill, max_tokens=4, logprobs=2)
                warm = await gateway.ask("warm", PROMPT, prefill, max_tokens=1)
                local = await gateway.ask("local", prompt_of(9), max_tokens=4)

                assert cold.finished is not None
                assert (cold.finished.cached_tokens, cold.finished.transport) == (0, "fake")
                assert cold.finished.prefill_s > 0
                assert cold.finished.transfer_exposed_s > 0
                assert cold.finished.first_decode_s > 0
                assert [len(sample.top) for sample in cold.samples] == [2, 2, 2, 2]
                assert warm.finished is not None
                assert warm.finished.cached_tokens == 28
                assert local.finished is not None
                assert (local.finished.transport, local.finished.transfer_exposed_s) == ("local", 0.0)

    asyncio.run(main())


def test_a_prompt_is_prefilled_and_handed_over_during_one_decode_step_and_decoded_in_the_very_next_one() -> None:
    """FIELD_PROBLEMS 56: nothing but the transfer lies between prefill and decode; no stage waits for its turn."""

    async def main() -> None:
        async with serving() as bench:
            gate, steps = Gate(), list[set[int]]()

            def on_step(batch: Sequence[ScheduledChunk]) -> None:
                steps.append({chunk.sequence.token_ids[0] for chunk in batch})
                gate(batch)

            prefill, decode = await bench.prefill(), await bench.decode(on_step=on_step)
            async with Gateway(decode.address) as gateway:
                gate.close()
                await gateway.start("busy", prompt_of(9, 10), prefill, max_tokens=8)
                await gate.arrived()
                await gateway.start("next", prompt_of(9, 50), prefill, max_tokens=3)
                await gateway.until(lambda: len(gateway.answers["next"].tokens) == 1)
                await until_changed(prefill, lambda: prefill.endpoint.num_active == 0)
                num_before = len(steps)
                gate.open()
                busy, following = await gateway.over("busy", "next")

                assert (len(busy.tokens), len(following.tokens)) == (8, 3)
                assert [50 in step for step in steps].index(True) == num_before

    asyncio.run(main())


def test_blocks_that_the_decode_worker_holds_are_not_sent() -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill, decode = await bench.prefill(), await bench.decode()
            async with Gateway(decode.address) as gateway:
                await gateway.ask("first", PROMPT, prefill, max_tokens=3)
                await gateway.ask("second", PROMPT, prefill, max_tokens=3)

                stats = {entry.peer_worker_id: entry for entry in prefill.endpoint.stats()}
                block_bytes = prefill.engine.layout.block_bytes
                # 30 tokens are 7 full blocks and a part of one; the second time only the part travels.
                assert stats["decode-0"].bytes == (8 + 1) * block_bytes

    asyncio.run(main())


def test_many_sequences_share_the_steps_and_each_step_is_one_message() -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill = await bench.prefill(num_blocks=256)
            decode = await bench.decode(num_blocks=256, running_max=4, step_s=0.002)
            async with Gateway(decode.address) as gateway:
                for number in range(12):
                    target = prefill if number % 3 else None
                    await gateway.start(f"r{number}", prompt_of(10, number), target, max_tokens=16)
                answers = await gateway.over(*gateway.answers)

                assert [a.tokens for a in answers] == [fake_continuation(prompt_of(10, n), 16) for n in range(12)]
                assert isinstance(decode.engine, FakeEngine)
                # Besides one for each step: one for each first token that came by itself.
                assert gateway.num_messages <= decode.engine.num_steps + 12

    asyncio.run(main())


async def crowd(decode: DecodeWorker, prefill: PrefillWorker | None) -> Mapping[str, int]:
    """Have five sequences answered by a worker whose pool is too small for all; return its counters."""
    async with Gateway(decode.address) as gateway:
        for number in range(5):
            await gateway.start(f"r{number}", prompt_of(8, number), prefill, max_tokens=30)
        answers = await gateway.over(*gateway.answers)

        assert [a.tokens for a in answers] == [fake_continuation(prompt_of(8, n), 30) for n in range(5)]
        counters = decode.loop.load().counters
        assert counters["preemptions_total"] > 0
        return counters


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_a_pool_too_small_for_all_preempts_and_all_finish(is_remote: bool) -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill = await bench.prefill()
            decode = await bench.decode(num_blocks=12)
            await crowd(decode, prefill if is_remote else None)

    asyncio.run(main())


@pytest.mark.parametrize("host_blocks", [0, 2, 1000])
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_preempted_sequences_come_back_from_the_host_tier_with_the_same_tokens(
    is_remote: bool, host_blocks: int
) -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill = await bench.prefill()
            bench.host_bytes = host_blocks * fake_layout().block_bytes
            # Computing a block takes longer than copying it.
            decode = await bench.decode(num_blocks=12, step_s=0.005)
            counters = await crowd(decode, prefill if is_remote else None)
            if host_blocks == 1000:
                assert counters["preempted_blocks_restored_total"] > 0

    asyncio.run(main())


def test_a_preempted_sequence_is_computed_again_where_the_tier_is_not_exact() -> None:
    """Otherwise it would go on with other tokens than those it would have had."""

    async def main() -> None:
        async with serving() as bench:
            bench.host_bytes = 1000 * fake_layout().block_bytes
            bench.host_codec = CODECS["int8"]
            decode = await bench.decode(num_blocks=12, step_s=0.005)
            counters = await crowd(decode, None)
            assert counters["preempted_blocks_restored_total"] == 0

    asyncio.run(main())


class WatchedCodec:
    """Copies blocks; before one comes back, `on_decode` is asked."""

    name, is_lossless = "raw", True

    def __init__(self, on_decode: Callable[[], None]) -> None:
        self._on_decode = on_decode

    def encoded_max(self, slabs: Slabs) -> int:
        return slabs.num_bytes

    def encode(self, raw: memoryview, slabs: Slabs) -> memoryview:
        return raw

    def decode(self, encoded: memoryview, slabs: Slabs, raw: memoryview) -> None:
        self._on_decode()
        raw[:] = encoded


@asynccontextmanager
async def tiered(bench: Bench, on_decode: Callable[[], None]) -> AsyncIterator[tuple[DecodeWorker, Gateway]]:
    """Give a worker with a small pool and a host tier; when a step begins, all that was evicted for it is encoded."""

    def settle(batch: Sequence[ScheduledChunk]) -> None:
        tiers = decode.engine.tiers
        assert tiers is not None
        while not tiers.is_settled:
            time.sleep(0.001)

    bench.host_codec, bench.host_bytes = WatchedCodec(on_decode), 1 << 20
    decode = await bench.decode(num_blocks=12, on_step=settle)
    async with Gateway(decode.address) as gateway:
        yield decode, gateway


def test_what_the_tier_cannot_give_back_of_a_preempted_sequence_is_computed() -> None:
    async def main() -> None:
        calls = 0

        def refuse_the_second() -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise TransferError("nothing that was encoded")

        async with serving() as bench, tiered(bench, refuse_the_second) as (decode, gateway):
            for number in range(2):
                await gateway.start(f"r{number}", prompt_of(8, number), max_tokens=38)
            answers = await gateway.over("r0", "r1")

            assert [a.tokens for a in answers] == [fake_continuation(prompt_of(8, n), 38) for n in range(2)]
            assert decode.loop.load().counters["preempted_blocks_restored_total"] == 1
            assert calls == 2

    asyncio.run(main())


def test_a_preempted_sequence_can_be_cancelled_while_its_blocks_come_back() -> None:
    async def main() -> None:
        loop, entered, flow = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def hold() -> None:
            loop.call_soon_threadsafe(entered.set)
            assert flow.wait(LIMIT_S)

        async with serving() as bench, tiered(bench, hold) as (decode, gateway):
            for number in range(2):
                await gateway.start(f"r{number}", prompt_of(8, number), max_tokens=38)
            await asyncio.wait_for(entered.wait(), LIMIT_S)
            await gateway.cancel("r1")
            await until_changed(decode, lambda: decode.loop.load().running_sequences == 0)
            assert decode.engine.pool.num_used > 0  # they are still written to
            flow.set()
            (oldest,) = await gateway.over("r0")

            assert oldest.tokens == fake_continuation(prompt_of(8, 0), 38)

    asyncio.run(main())


def test_a_sequence_without_a_limit_ends_when_it_fills_the_pool() -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode(num_blocks=4)
            async with Gateway(decode.address) as gateway:
                for options in ({}, {"max_tokens": decode.engine.context_tokens - 6}):
                    answer = await gateway.ask("alone", prompt_of(6), **options)

                    assert answer.tokens == fake_continuation(prompt_of(6), 10)
                    assert answer.finished is not None
                    assert answer.finished.reason == common_pb2.FINISH_REASON_LENGTH

    asyncio.run(main())


@pytest.mark.parametrize(
    ("token_ids", "options", "words"),
    [
        pytest.param(prompt_of(64), {}, "needs 17 blocks, the pool has 16", id="prompt"),
        pytest.param(prompt_of(8), {"max_tokens": 60}, "need 17 blocks, the pool has 16", id="max_tokens"),
        pytest.param([], {"num_prompt_tokens": 1}, "need at least 1", id="empty"),
        pytest.param([5, 1000], {}, "got 1000", id="vocabulary"),
        pytest.param([5], {"top_p": 2.0}, "top_p must be in", id="sampling"),
    ],
)
def test_what_can_never_be_served_is_refused_with_limit_and_value(
    token_ids: Sequence[int], options: dict[str, float], words: str
) -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode(num_blocks=16)
            async with Gateway(decode.address) as gateway:
                answer = await gateway.ask("bad", token_ids, **options)
                fine = await gateway.ask("fine", prompt_of(5), max_tokens=3)

                assert isinstance(answer.error, InvalidRequestError)
                assert words in answer.error.message
                assert fine.tokens == fake_continuation(prompt_of(5), 3)

    asyncio.run(main())


def test_errors_of_the_prefill_worker_arrive_with_its_code_and_words() -> None:
    async def main() -> None:
        async with serving() as bench:
            small = await bench.prefill("prefill-small", num_blocks=4)
            full = await bench.prefill("prefill-full", waiting_max=1, on_step=(gate := Gate()))
            decode = await bench.decode()
            async with Gateway(decode.address) as gateway:
                too_large = await gateway.ask("too large", PROMPT, small)
                assert isinstance(too_large.error, InvalidRequestError)
                assert "needs 8 blocks, the pool has 4" in too_large.error.message

                bench.network.open_errors.append(MismatchError("dtype is 'a' here and 'b' there"))
                mismatch = await gateway.ask("mismatch", PROMPT, full)
                assert isinstance(mismatch.error, MismatchError)
                assert mismatch.error.message == "dtype is 'a' here and 'b' there"

                bench.network.piece_errors.append(TransferError("checksum of piece 0 is wrong"))
                torn = await gateway.ask("torn", PROMPT, full)
                assert isinstance(torn.error, TransferError)
                assert "checksum of piece 0" in torn.error.message

                gate.close()
                await gateway.start("in step", prompt_of(5), full, max_tokens=2)
                await gate.arrived()
                await gateway.start("queued", prompt_of(6), full, max_tokens=2)
                await until_changed(full, lambda: full.loop.load().waiting_sequences == 1)
                refused = await gateway.ask("refused", prompt_of(7), full)
                assert isinstance(refused.error, OverloadedError)
                assert refused.error.retry_after_s == 1.0
                assert "prefill-full" in refused.error.message
                gate.open()
                await gateway.over("in step", "queued")

    asyncio.run(main())


def test_a_crash_of_the_prefill_loop_is_unavailable_and_the_decode_worker_lives_on() -> None:
    def explode(batch: Sequence[ScheduledChunk]) -> None:
        raise RuntimeError("the kernel is wrong")

    async def main() -> None:
        async with serving() as bench:
            prefill = await bench.prefill(on_step=explode)
            bench.crashed.add("prefill-0")
            decode = await bench.decode()
            async with Gateway(decode.address) as gateway:
                lost = await gateway.ask("lost", PROMPT, prefill)
                again = await gateway.ask("again", PROMPT, prefill)
                local = await gateway.ask("local", PROMPT, max_tokens=2)

                assert type(lost.error) is type(again.error) is WorkerLostError
                assert "the kernel is wrong" in lost.error.message
                assert local.tokens == fake_continuation(PROMPT, 2)
                with pytest.raises(WorkerLostError, match="the kernel is wrong"):
                    await asyncio.wait_for(prefill.wait_failed(), LIMIT_S)
            async with open_channel(decode.address) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=LIMIT_S
                )
                assert health.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(main())


def test_a_crash_of_the_decode_loop_fails_its_requests_and_is_reported() -> None:
    calls = 0

    def explode(batch: Sequence[ScheduledChunk]) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("out of memory")

    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode(on_step=explode)
            bench.crashed.add("decode-0")
            async with Gateway(decode.address) as gateway:
                await gateway.start("a", PROMPT, max_tokens=50)
                await gateway.start("b", prompt_of(7), max_tokens=50)
                answers = await gateway.over("a", "b")

                assert all(type(answer.error) is WorkerLostError for answer in answers)
                with pytest.raises(WorkerLostError, match="out of memory"):
                    await asyncio.wait_for(decode.wait_failed(), LIMIT_S)

    asyncio.run(main())


def test_a_prefill_worker_that_dies_is_unavailable_and_works_again_after_its_return() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            prefill = await bench.prefill(on_step=gate)
            decode = await bench.decode()
            async with Gateway(decode.address) as gateway:
                gate.close()
                await gateway.start("lost", PROMPT, prefill)
                await gate.arrived()
                target = worker_pb2.PrefillTarget(worker_id="prefill-0", address=prefill.address)
                bench.network.endpoints["prefill-0"].kill()
                stopping = asyncio.create_task(prefill.stop(0.0))
                (lost,) = await gateway.over("lost")
                gate.open()
                await stopping
                bench.workers.remove(prefill)

                assert isinstance(lost.error, WorkerLostError)
                gone = await gateway.ask("gone", PROMPT, target)
                assert type(gone.error) is WorkerLostError
                restarted = await bench.prefill()
                back = await gateway.ask("back", PROMPT, restarted, max_tokens=3)
                assert back.tokens == fake_continuation(PROMPT, 3)

    asyncio.run(main())


def test_cancelling_a_queued_or_prefilling_sequence_gives_everything_back() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            prefill = await bench.prefill(token_budget=4, on_step=gate)
            decode = await bench.decode()
            async with Gateway(decode.address) as gateway:
                gate.close()
                await gateway.start("prefilling", PROMPT, prefill)
                await gate.arrived()
                await gateway.start("queued", prompt_of(30), prefill)
                await until_changed(prefill, lambda: prefill.loop.load().waiting_sequences == 1)
                await gateway.cancel("queued")
                await until_changed(prefill, lambda: prefill.loop.load().waiting_sequences == 0)
                assert prefill.engine.pool.num_used == 8
                await gateway.cancel("prefilling")
                await until_changed(prefill, lambda: prefill.loop.load().running_sequences == 0)
                assert prefill.engine.pool.num_used == 8  # the step still writes
                gate.open()
                await bench.at_rest()

                assert not any(answer.is_over for answer in gateway.answers.values())
                assert gate.entered == 1

    asyncio.run(main())


def test_cancelling_while_blocks_travel_waits_until_nothing_moves() -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill, decode = await bench.prefill(), await bench.decode()
            async with Gateway(decode.address) as gateway:
                bench.network.hold()
                await gateway.start("travelling", PROMPT, prefill)
                await gateway.until(lambda: len(gateway.answers["travelling"].tokens) == 1)
                assert decode.engine.pool.num_used == 8
                await gateway.cancel("travelling")
                await bench.at_rest()
                bench.network.flow()

                assert gateway.answers["travelling"].tokens == fake_continuation(PROMPT, 1)
                assert decode.engine.pool.num_kept == 0  # nothing that did not land is findable
                assert prefill.engine.pool.num_kept == 7

    asyncio.run(main())


def test_a_cancelled_decode_says_no_more_and_keeps_its_blocks_until_the_step_is_over() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            decode = await bench.decode(on_step=gate)
            async with Gateway(decode.address) as gateway:
                await gateway.start("cancelled", PROMPT)
                await gateway.until(lambda: len(gateway.answers["cancelled"].tokens) >= 2)
                gate.close()
                await gate.arrived()
                await gateway.cancel("cancelled")
                await until_changed(decode, lambda: decode.loop.load().running_sequences == 0)
                assert decode.engine.pool.num_used >= 8
                gate.open()
                await bench.at_rest()

                said = gateway.answers["cancelled"]
                assert not said.is_over
                assert said.tokens == fake_continuation(PROMPT, len(said.tokens))

    asyncio.run(main())


def test_waiting_and_preempted_sequences_can_be_cancelled() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            decode = await bench.decode(num_blocks=9, on_step=gate)
            async with Gateway(decode.address) as gateway:
                for number in range(4):
                    await gateway.start(f"r{number}", prompt_of(8, number), max_tokens=24)
                await until_changed(decode, lambda: decode.loop.load().counters.get("preemptions_total", 0) > 0)
                gate.close()
                await gate.arrived()
                for number in range(1, 4):
                    await gateway.cancel(f"r{number}")
                await until_changed(decode, lambda: decode.loop.load().waiting_sequences == 0)
                gate.open()
                (oldest,) = await gateway.over("r0")

                assert oldest.tokens == fake_continuation(prompt_of(8, 0), 24)

    asyncio.run(main())


def test_a_lost_session_cancels_its_sequences_and_no_others() -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill = await bench.prefill()
            decode = await bench.decode(step_s=0.001)
            async with Gateway(decode.address, "stays") as stays:
                async with Gateway(decode.address, "leaves") as leaves:
                    await stays.start("same id", PROMPT, max_tokens=60)
                    await leaves.start("same id", prompt_of(20), prefill)
                    await leaves.start("local", prompt_of(9))
                    await leaves.until(lambda: all(len(a.tokens) > 1 for a in leaves.answers.values()))
                (answer,) = await stays.over("same id")

                assert answer.tokens == fake_continuation(PROMPT, 60)
                await bench.at_rest()

    asyncio.run(main())


def test_a_gateway_that_attaches_again_ends_its_older_session() -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode(step_s=0.001)
            async with Gateway(decode.address) as older:
                await older.start("r", PROMPT)
                await older.until(lambda: len(older.answers["r"].tokens) > 1)
                async with Gateway(decode.address) as newer:
                    ended = await asyncio.wait_for(older.ended, LIMIT_S)
                    answer = await newer.ask("r", PROMPT, max_tokens=3)

                assert ended is not None
                assert ended.code() == grpc.StatusCode.CANCELLED
                assert answer.tokens == fake_continuation(PROMPT, 3)

    asyncio.run(main())


def test_a_gateway_that_does_not_read_loses_its_session_and_stalls_nobody() -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode(num_blocks=512, unsent_max=50)
            async with Gateway(decode.address, "reads") as reads, Gateway(decode.address, "deaf", False) as deaf:
                await deaf.start("deaf", PROMPT, max_tokens=1500, logprobs=20)
                await until_changed(decode, lambda: decode.loop.load().running_sequences == 1)
                answer = await reads.ask("reads", PROMPT, max_tokens=40)
                await until_changed(decode, lambda: decode.loop.load().running_sequences == 0)
                deaf.read()
                ended = await asyncio.wait_for(deaf.ended, LIMIT_S)

                assert answer.tokens == fake_continuation(PROMPT, 40)
                assert ended is not None
                assert ended.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert len(deaf.answers["deaf"].tokens) < 1500

    asyncio.run(main())


def test_duplicate_and_unknown_ids_are_answered_and_harm_nobody() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            decode = await bench.decode(on_step=gate)
            async with Gateway(decode.address) as gateway:
                gate.close()
                await gateway.start("twice", PROMPT, max_tokens=4)
                await gate.arrived()
                first = gateway.answers["twice"]
                await gateway.start("twice", PROMPT, max_tokens=4)
                (duplicate,) = await gateway.over("twice")
                gateway.answers["twice"] = first
                gate.open()
                await gateway.over("twice")
                await gateway.cancel("twice")
                await gateway.until(lambda: first.error is not None)

                assert isinstance(duplicate.error, InvalidRequestError)
                assert first.tokens == fake_continuation(PROMPT, 4)
                assert isinstance(first.error, NotFoundError)

    asyncio.run(main())


def test_a_session_must_begin_with_attach() -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode()
            async with Gateway(decode.address, gateway_id="") as gateway:
                ended = await asyncio.wait_for(gateway.ended, LIMIT_S)

                assert ended is not None
                assert ended.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "travelling", "decoding"])
def test_the_deadline_ends_a_request_in_every_state(stage: str) -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill_gate, decode_gate = Gate(), Gate()
            prefill = await bench.prefill(on_step=prefill_gate)
            decode = await bench.decode(running_max=1, on_step=decode_gate)
            async with Gateway(decode.address) as gateway:
                if stage == "waiting":
                    await gateway.start("before", prompt_of(9))
                if stage == "prefilling":
                    prefill_gate.close()
                if stage == "travelling":
                    bench.network.hold()
                if stage == "decoding":
                    decode_gate.close()
                answer = await gateway.ask("late", PROMPT, prefill, timeout_s=0.15)
                prefill_gate.open()
                decode_gate.open()
                bench.network.flow()
                if stage == "waiting":
                    await gateway.cancel("before")
                await bench.at_rest()

                assert isinstance(answer.error, DeadlineError)

    asyncio.run(main())


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            decode = await bench.decode(running_max=1, waiting_max=2, on_step=gate)
            async with Gateway(decode.address) as gateway:
                gate.close()
                for number in range(3):
                    await gateway.start(f"r{number}", prompt_of(8, number), max_tokens=2)
                refused = await gateway.ask("refused", PROMPT)
                gate.open()
                await gateway.over("r0", "r1", "r2")

                assert isinstance(refused.error, OverloadedError)
                assert refused.error.retry_after_s == 1.0

    asyncio.run(main())


def test_draining_refuses_new_requests_and_finishes_the_running_ones() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            decode = await bench.decode(on_step=gate)
            async with Gateway(decode.address) as gateway:
                gate.close()
                await gateway.start("running", PROMPT, max_tokens=5)
                await gate.arrived()
                assert await decode.loop.drain(0.0) == 1
                draining = asyncio.create_task(decode.loop.drain(LIMIT_S))
                refused = await gateway.ask("refused", PROMPT)
                gate.open()
                (running,) = await gateway.over("running")

                assert isinstance(refused.error, OverloadedError)
                assert running.tokens == fake_continuation(PROMPT, 5)
                assert await draining == 0

    asyncio.run(main())


def test_stopping_fails_what_is_left_with_a_typed_error() -> None:
    async def main() -> None:
        async with serving() as bench:
            gate = Gate()
            decode = await bench.decode(on_step=gate)
            async with Gateway(decode.address) as gateway:
                gate.close()
                await gateway.start("running", PROMPT)
                await gate.arrived()
                stopping = asyncio.create_task(decode.stop(0.0))
                (answer,) = await gateway.over("running")
                gate.open()
                await stopping
                await decode.wait_failed()
                bench.workers.remove(decode)

                assert type(answer.error) is WorkerLostError
                assert is_at_rest(decode)

    asyncio.run(main())


def test_an_unreachable_prefill_worker_is_a_lost_worker() -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode()
            async with Gateway(decode.address) as gateway:
                target = worker_pb2.PrefillTarget(worker_id="nobody", address="127.0.0.1:1")
                answer = await gateway.ask("lost", PROMPT, target)

                assert type(answer.error) is WorkerLostError
                assert isinstance(answer.error, BatonError)

    asyncio.run(main())


def test_an_address_that_is_none_is_the_callers_mistake() -> None:
    async def main() -> None:
        async with serving() as bench:
            decode = await bench.decode()
            async with Gateway(decode.address) as gateway:
                for number, address in enumerate(["", "here", "a b:1", "here:0", "x:y:z"]):
                    target = worker_pb2.PrefillTarget(worker_id="nobody", address=address)
                    answer = await gateway.ask(f"r{number}", PROMPT, target)

                    assert isinstance(answer.error, InvalidRequestError)
                    assert "prefill.address" in answer.error.message

    asyncio.run(main())


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_the_seconds_of_all_steps_are_shared_out_to_the_sequences_in_them(is_remote: bool) -> None:
    async def main() -> None:
        async with serving() as bench:
            workers = [await bench.decode(step_s=0.001)]
            prefill = await bench.prefill() if is_remote else None
            async with Gateway(workers[0].address) as gateway:
                names = [f"r{number}" for number in range(6)]
                for number, name in enumerate(names):
                    await gateway.start(name, prompt_of(5 + 3 * number, number), prefill, max_tokens=4 + number)
                answers = await gateway.over(*names)

            found = [answer.finished for answer in answers if answer.finished is not None]
            assert len(found) == len(names)
            runners = [workers[0].loop.runner, *([prefill.loop.runner] if prefill is not None else [])]
            computed_s = sum(runner.count.to_pb().seconds for runner in runners)
            assert sum(one.prefill_device_s + one.decode_device_s for one in found) == pytest.approx(computed_s)
            assert all(one.prefill_device_s > 0 and one.decode_device_s > 0 for one in found)

    asyncio.run(main())
