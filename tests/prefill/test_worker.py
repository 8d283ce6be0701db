"""A prefill worker computes the prompt, pushes what the receiver lacks, and lets go of everything in every case."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton_pb.v1 import common_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc
from common.config import PrefillConfig
from common.errors import DeadlineError, InvalidRequestError, TransferError
from common.status import error_from_rpc
from engine.fake import FakeEngine, fake_continuation
from kvtransfer.fake import FakeEndpoint, FakeNetwork
from prefill.worker import PrefillWorker

LIMIT_S = 10.0
PROMPT = list(range(200, 230))


class Bench:
    """A prefill worker, and a receiver's pool and endpoint."""

    def __init__(self, config: dict[str, Any], num_blocks: int) -> None:
        self.network = FakeNetwork()
        self.engine = FakeEngine(num_blocks=num_blocks)
        self.receiver_engine = FakeEngine()
        endpoint = self.network.endpoint("prefill-0", self.engine.kv)  # type: ignore[arg-type]  # a BlockStore is enough
        self.receiver: FakeEndpoint = self.network.endpoint("receiver", self.receiver_engine.kv)  # type: ignore[arg-type]
        self.worker = PrefillWorker("prefill-0", "127.0.0.1", self.engine, endpoint, PrefillConfig(**config), 0.5)
        self.channel = grpc.aio.insecure_channel(self.worker.address)
        self.stub: Any = worker_pb2_grpc.PrefillStub(self.channel)

    def call(self, token_ids: Sequence[int], ticket: transfer_pb2.Ticket, **more: Any) -> Any:
        fields = {"num_prompt_tokens": len(token_ids), "sampling": common_pb2.SamplingParams(temperature=0.0), **more}
        request = worker_pb2.PrefillRequest(request_id="r", token_ids=token_ids, ticket=ticket, **fields)
        return self.stub.Prefill(request)

    async def at_rest(self) -> None:
        """Wait until all is given back."""
        changed = asyncio.Event()
        self.worker.loop.on_change(changed.set)
        async with asyncio.timeout(LIMIT_S):
            while self.engine.pool.num_used or self.worker.loop.load().running_sequences:
                changed.clear()
                await changed.wait()


@asynccontextmanager
async def serving(num_blocks: int = 64, **config: Any) -> AsyncIterator[Bench]:
    bench = Bench(config, num_blocks)
    await bench.worker.serve()
    try:
        yield bench
        await bench.at_rest()
        assert bench.worker.endpoint.num_active == 0
    finally:
        await bench.channel.close(None)
        await bench.worker.stop(0.0)
    bench.engine.pool.check()
    assert bench.engine.pool.num_used == 0
    assert bench.engine.kv_faults == []
    assert bench.worker.loop.runner.num_tasks == 0


async def updates(call: Any) -> list[worker_pb2.PrefillUpdate]:
    return [update async for update in call]


def test_the_first_token_comes_before_the_push_is_over() -> None:
    async def main() -> None:
        async with serving(token_budget=8) as bench:
            blocks = bench.receiver_engine.pool.allocate(8)
            landing = bench.receiver.grant(blocks, 0)
            bench.network.hold()
            call = bench.call(PROMPT, landing.ticket)
            first = (await asyncio.wait_for(call.read(), LIMIT_S)).first_token
            assert not landing.is_over
            bench.network.flow()
            pushed = (await asyncio.wait_for(call.read(), LIMIT_S)).pushed
            await asyncio.wait_for(landing.landed(), LIMIT_S)

            assert first.token.token_id == fake_continuation(PROMPT, 1)[0]
            assert first.cached_tokens == 0
            assert pushed.num_bytes == 8 * bench.engine.layout.block_bytes
            for source, target in enumerate(blocks):
                size = bench.engine.layout.block_bytes
                theirs = bytes(bench.engine.kv.buffer[source * size : (source + 1) * size])
                ours = bytes(bench.receiver_engine.kv.buffer[target * size : (target + 1) * size])
                assert ours == theirs

    asyncio.run(main())


@pytest.mark.parametrize("first_block", [0, 3, 7, 8])
def test_only_the_tickets_blocks_are_sent_and_cached_ones_at_once(first_block: int) -> None:
    async def main() -> None:
        async with serving(token_budget=8) as bench:
            for attempt in range(2):
                blocks = bench.receiver_engine.pool.allocate(8 - first_block)
                landing = bench.receiver.grant(blocks, first_block)
                first, pushed = await updates(bench.call(PROMPT, landing.ticket))
                await asyncio.wait_for(landing.landed(), LIMIT_S)

                assert first.first_token.token.token_id == fake_continuation(PROMPT, 1)[0]
                assert first.first_token.cached_tokens == 28 * attempt
                assert pushed.pushed.num_bytes == (8 - first_block) * bench.engine.layout.block_bytes
            assert bench.engine.num_computed_tokens == 30 + 2

    asyncio.run(main())


@pytest.mark.parametrize(("layer_groups", "num_pieces"), [(1, 4), (2, 5), (9, 5)])
def test_the_layers_of_a_last_chunk_travel_in_groups(layer_groups: int, num_pieces: int) -> None:
    async def main() -> None:
        async with serving(token_budget=8, layer_groups=layer_groups) as bench:
            blocks = bench.receiver_engine.pool.allocate(8)
            landing = bench.receiver.grant(blocks, 0)
            await updates(bench.call(PROMPT, landing.ticket))
            await asyncio.wait_for(landing.landed(), LIMIT_S)

            assert [entry.pieces for entry in bench.receiver.stats()] == [num_pieces]  # 4 chunks of 2 blocks, 2 layers
            size = bench.engine.layout.block_bytes
            sent = bytes(bench.engine.kv.buffer[: 8 * size])
            assert b"".join(bytes(bench.receiver_engine.kv.buffer[b * size : (b + 1) * size]) for b in blocks) == sent

    asyncio.run(main())


def test_a_prompt_that_leaves_while_its_layers_are_announced_gives_everything_back() -> None:
    async def main() -> None:
        async with serving(layer_groups=2) as bench:
            landing = bench.receiver.grant(bench.receiver_engine.pool.allocate(8), 0)
            bench.network.hold()
            call = bench.call(PROMPT, landing.ticket)
            await asyncio.wait_for(call.read(), LIMIT_S)
            call.cancel()
            await bench.at_rest()
            bench.network.flow()
            await landing.abort("the caller left")

    asyncio.run(main())


def test_a_moved_sequence_continues_its_draws() -> None:
    async def main() -> None:
        async with serving() as bench:
            sampling = common_pb2.SamplingParams(temperature=1.0, seed=9)
            want = fake_continuation(PROMPT, 5, seed=9)
            landing = bench.receiver.grant(bench.receiver_engine.pool.allocate(9), 0)
            call = bench.call(PROMPT + want[:4], landing.ticket, num_prompt_tokens=30, sampling=sampling)
            first, _ = await updates(call)
            await landing.landed()

            assert first.first_token.token.token_id == want[4]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("num_ticket_blocks", "options", "words"),
    [
        pytest.param(7, {}, "the ticket covers blocks 0+7 of 8", id="ticket"),
        pytest.param(8, {"num_prompt_tokens": 31}, "31 of 30 tokens", id="prompt length"),
        pytest.param(8, {"sampling": common_pb2.SamplingParams(temperature=float("nan"))}, "temperature", id="NaN"),
        pytest.param(8, {"cache_salt": b"x" * 65}, "cache_salt", id="salt"),
    ],
)
def test_what_makes_no_sense_is_refused(num_ticket_blocks: int, options: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with serving() as bench:
            landing = bench.receiver.grant(bench.receiver_engine.pool.allocate(num_ticket_blocks), 0)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await updates(bench.call(PROMPT, landing.ticket, **options))
            await landing.abort("refused")

            error = error_from_rpc(raised.value)
            assert isinstance(error, InvalidRequestError)
            assert words in error.message

    asyncio.run(main())


def test_a_ticket_cannot_be_used_twice() -> None:
    async def main() -> None:
        async with serving() as bench:
            landing = bench.receiver.grant(bench.receiver_engine.pool.allocate(8), 0)
            await updates(bench.call(PROMPT, landing.ticket))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await updates(bench.call(PROMPT, landing.ticket))
            await landing.landed()

            assert isinstance(error_from_rpc(raised.value), TransferError)

    asyncio.run(main())


def test_a_receiver_that_gives_up_fails_the_call_and_frees_the_blocks() -> None:
    async def main() -> None:
        async with serving() as bench:
            landing = bench.receiver.grant(bench.receiver_engine.pool.allocate(8), 0)
            bench.network.hold()
            call = bench.call(PROMPT, landing.ticket)
            await asyncio.wait_for(call.read(), LIMIT_S)
            await landing.abort("no room after all")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(call.read(), LIMIT_S)
            bench.network.flow()

            error = error_from_rpc(raised.value)
            assert isinstance(error, TransferError)
            assert "no room after all" in error.message

    asyncio.run(main())


def test_the_deadline_ends_a_push_that_hangs() -> None:
    async def main() -> None:
        async with serving() as bench:
            landing = bench.receiver.grant(bench.receiver_engine.pool.allocate(8), 0)
            bench.network.hold()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await updates(bench.call(PROMPT, landing.ticket, timeout_s=0.1))
            bench.network.flow()

            assert isinstance(error_from_rpc(raised.value), DeadlineError)

    asyncio.run(main())


def test_prompts_that_do_not_fit_at_once_wait_for_blocks() -> None:
    async def main() -> None:
        async with serving(num_blocks=10) as bench:
            landings = [bench.receiver.grant(bench.receiver_engine.pool.allocate(8), 0) for _ in range(4)]
            prompts = [[number, *PROMPT[1:]] for number in range(4)]
            calls = [bench.call(prompt, landing.ticket) for prompt, landing in zip(prompts, landings, strict=True)]
            answers = await asyncio.wait_for(asyncio.gather(*(updates(call) for call in calls)), LIMIT_S)
            for landing in landings:
                await landing.landed()

            first_tokens = [answer[0].first_token.token.token_id for answer in answers]
            assert first_tokens == [fake_continuation(prompt, 1)[0] for prompt in prompts]

    asyncio.run(main())
