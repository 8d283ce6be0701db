"""With real engines and real transfers through shared memory: the same tokens, and blocks return from a silent peer."""

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton_pb.v1 import worker_pb2, worker_pb2_grpc
from common.config import DecodeConfig, EngineConfig, PrefillConfig, TransferConfig
from common.errors import BatonError, ConfigError, TransferError
from common.grammar import constraint_of, json_form
from common.text import Text
from decode.worker import DecodeWorker
from engine.rpc_server import RpcServer
from engine.tiny import make_tiny_model
from prefill.worker import PrefillWorker
from tests.decode.serving import Gateway, until_changed
from tests.integration.asking import Oracle
from tests.kvtransfer.faulty_wire import KINDS, Fault, Kind, Stream, faulty_wire

logger = logging.getLogger(__name__)

NUM_PLACES = 2
"""In each stream of bytes, for each kind of fault."""
LEASE_S = 0.6
PROMPT = [(11 * i) % 250 + 4 for i in range(45)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@asynccontextmanager
async def workers(model_dir: Path, **settings: Any) -> AsyncIterator[tuple[PrefillWorker, DecodeWorker]]:
    engine = EngineConfig(
        backend="reference", weights="fp32", kv_dtype="float32", block_tokens=8, pool_blocks=32, threads=1
    )
    transfer = TransferConfig.model_validate({"transport": "shm", "lease_s": LEASE_S, **settings})
    prefill = await PrefillWorker.start(
        "prefill-0", "127.0.0.1", model_dir, "tiny", engine, PrefillConfig(token_budget=16), transfer, 0.5
    )
    decode = await DecodeWorker.start(
        "decode-0", "127.0.0.1", model_dir, "tiny", engine, DecodeConfig(token_budget=16), transfer, 0.5
    )
    try:
        yield prefill, decode
    finally:
        await decode.stop(0.0)
        await prefill.stop(0.0)
    for worker in (prefill, decode):
        worker.engine.pool.check()
        assert worker.engine.pool.num_used == 0


def test_remote_and_local_prefill_give_the_same_tokens_cold_and_warm(model_dir: Path) -> None:
    async def main() -> None:
        async with workers(model_dir) as (prefill, decode), Gateway(decode.address) as gateway:
            options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
            remote = await gateway.ask("remote", PROMPT, prefill, **options)
            again = await gateway.ask("again", PROMPT, prefill, **options)
            local = await gateway.ask("local", [*PROMPT[:40], *PROMPT[40:]], **options)

            assert len(remote.tokens) == 20
            assert remote.tokens == again.tokens == local.tokens
            assert remote.finished is not None
            assert remote.finished.transport == "shm"
            assert again.finished is not None
            assert again.finished.cached_tokens == 40

    asyncio.run(main())


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "fp8"])
@pytest.mark.parametrize("transport", ["ucx", "tcp"])
def test_sealed_and_coded_blocks_give_the_same_tokens_where_nothing_is_lost(
    model_dir: Path, oracle: Oracle, transport: str, codec: str
) -> None:
    async def main() -> None:
        settings = {"transport": transport, "codec": codec, "sealed": True, "codec_kl_max": 100.0, "lease_s": 10.0}
        async with workers(model_dir, **settings) as (prefill, decode), Gateway(decode.address) as gateway:
            options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
            remote = await gateway.ask("remote", PROMPT, prefill, **options)
            expected = oracle.generate(PROMPT, 20)

            assert remote.finished is not None
            assert remote.finished.transport == transport
            assert len(remote.tokens) == 20
            assert remote.tokens[0] == expected[0]  # the prefill worker's own
            if codec in ("raw", "lossless"):
                assert remote.tokens == expected

    asyncio.run(main())


@pytest.mark.parametrize("mode", [{"codec": "raw"}, {"codec": "lossless", "sealed": True}], ids=["raw", "sealed"])
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_byte_between_two_workers_gives_right_tokens_or_a_typed_error(
    model_dir: Path, oracle: Oracle, mode: dict[str, Any], kind: Kind
) -> None:
    seed = random.randrange(1 << 32)
    logger.warning("seed %d", seed)
    draw = random.Random(seed)
    prompts = ([draw.randrange(4, 254) for _ in range(45)] for _ in itertools.count())
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}

    async def main() -> None:
        async with (
            workers(model_dir, transport="tcp", **mode) as (prefill, decode),
            faulty_wire(decode.endpoint.address) as wire,
            Gateway(decode.address) as gateway,
        ):

            async def ask() -> bool:
                """Return whether the answer is right; else it is a typed error, after none but right tokens."""
                prompt = next(prompts)
                answer = await gateway.ask(f"r{prompt}", prompt, prefill, **options)
                expected = oracle.generate(prompt, 4)
                assert answer.tokens == expected[: len(answer.tokens)]
                assert answer.tokens == expected or isinstance(answer.error, BatonError)
                return answer.error is None

            async def pass_whole() -> dict[Stream, int]:
                while not await ask():  # what a fault broke is made anew
                    pass
                before = dict(wire.num_bytes)
                while not await ask():
                    before = dict(wire.num_bytes)
                return {stream: wire.num_bytes[stream] - before[stream] for stream in wire.num_bytes}

            num_met = 0
            for stream in wire.num_bytes:
                for _ in range(NUM_PLACES):
                    reach = (await pass_whole())[stream]
                    wire.fault = Fault(kind, stream, wire.num_bytes[stream] + draw.randrange(max(1, reach)))
                    await ask()
                    num_met += wire.fault is None
                    wire.fault = None
            assert num_met >= NUM_PLACES, "faults were set where nothing passes"

    asyncio.run(main())


def test_a_codec_beyond_the_bound_keeps_a_worker_from_starting(model_dir: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"codec fp8 changes .* transfer.codec_kl_max=1e-09"):
            async with workers(model_dir, codec="fp8", codec_kl_max=1e-9):
                pass

    asyncio.run(main())


def test_a_prefill_worker_that_fetches_the_last_answer_gives_the_same_tokens(model_dir: Path) -> None:
    async def main() -> None:
        async with workers(model_dir) as (prefill, decode), Gateway(decode.address) as gateway:
            options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
            told = (await gateway.ask("turn-1", PROMPT, prefill, **options)).tokens
            conversation = [*PROMPT, *told, *PROMPT[:9]]
            holder = worker_pb2.PrefixHolder(worker_id="decode-0", address=decode.address, num_blocks=8)
            fetched = await gateway.ask("turn-2", conversation, prefill, holder=holder, **options)
            local = await gateway.ask("local", conversation, **options)

            assert fetched.tokens == local.tokens
            assert fetched.finished is not None
            assert fetched.finished.cached_tokens == 64
            assert prefill.loop.load().counters["fetched_tokens_total"] == 64 - 40

    asyncio.run(main())


def test_a_schema_is_obeyed_wherever_each_token_was_chosen(model_dir: Path) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}, "b": {"type": "string", "maxLength": 9}},
    }
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    rules = {"constraint": constraint_of(json_form(schema, "schema")), "max_tokens": 120}

    async def main() -> None:
        async with workers(model_dir) as (prefill, decode), Gateway(decode.address) as gateway:
            for seed in range(4):
                options: dict[str, Any] = {**rules, "temperature": 1.0, "seed": seed}
                remote = await gateway.ask(f"remote {seed}", PROMPT, prefill, **options)
                local = await gateway.ask(f"local {seed}", PROMPT, **options)

                assert remote.tokens == local.tokens
                value = json.loads(Text.load(model_dir).decode(remote.tokens))
                assert value["a"] in (1, 22)
                assert len(value["b"]) <= 9

    asyncio.run(main())


def test_sequences_at_once_equal_sequences_one_by_one(model_dir: Path) -> None:
    async def main() -> None:
        async with workers(model_dir) as (prefill, decode), Gateway(decode.address) as gateway:
            prompts = [PROMPT[start : start + 15] for start in range(6)]
            alone = [
                (await gateway.ask(f"alone {n}", p, max_tokens=12, ignore_eos=True)).tokens
                for n, p in enumerate(prompts)
            ]
            for number, prompt in enumerate(prompts):
                await gateway.start(f"r{number}", prompt, prefill, max_tokens=12, ignore_eos=True)
            answers = await gateway.over(*(f"r{n}" for n in range(6)))

            assert [answer.tokens for answer in answers] == alone

    asyncio.run(main())


class SilentPrefill(worker_pb2_grpc.PrefillServicer):
    """Takes every request and never says a word."""

    async def Prefill(  # type: ignore[override]  # noqa: N802
        self,
        request: worker_pb2.PrefillRequest,
        context: "grpc.aio.ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillUpdate]",
    ) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["waited for", "cancelled"])
def test_a_silent_prefill_worker_costs_a_lease_and_no_block(model_dir: Path, is_cancelled: bool) -> None:
    async def main() -> None:
        server = RpcServer.bind("127.0.0.1")
        worker_pb2_grpc.add_PrefillServicer_to_server(SilentPrefill(), server.server)
        await server.start()
        try:
            async with workers(model_dir) as (_, decode), Gateway(decode.address) as gateway:
                began = time.monotonic()
                target = worker_pb2.PrefillTarget(worker_id="silent", address=server.address)
                await gateway.start("silent", PROMPT, target)
                await until_changed(decode, lambda: decode.engine.pool.num_used > 0)
                if is_cancelled:
                    await gateway.cancel("silent")
                    await until_changed(decode, lambda: decode.loop.load().running_sequences == 0)
                else:
                    (answer,) = await gateway.over("silent")
                    assert isinstance(answer.error, TransferError)
                    assert time.monotonic() - began >= LEASE_S / 2
                await until_changed(decode, lambda: decode.engine.pool.num_used == 0)
                local = await gateway.ask("local", PROMPT, max_tokens=2, ignore_eos=True)

                assert len(local.tokens) == 2
                assert decode.endpoint.num_active == 0
        finally:
            await server.stop(0.0)

    asyncio.run(main())
