"""Whatever a wire does to the blocks of a prompt, a request ends with the right tokens or with a typed error."""

import asyncio
from random import Random
from typing import Any

import pytest

from common.config import DecodeConfig, PrefillConfig, TransferConfig
from common.errors import BatonError
from decode.worker import DecodeWorker
from engine.fake import FakeEngine, fake_continuation
from prefill.worker import PrefillWorker
from tests.decode.serving import Gateway, is_at_rest, until_changed
from tests.kvtransfer.faulty import FaultyEndpoint, FaultyNetwork

LEASE_S = 1.0
NUM_REQUESTS = 40
MODES = [
    pytest.param({"codec": "raw"}, id="raw"),
    pytest.param({"codec": "lossless"}, id="lossless"),
    pytest.param({"codec": "raw", "sealed": True, "checksum": False}, id="sealed"),
]


class Damage:
    """Does something to every third message or so: a bit at any place, an end cut off, another message in its place."""

    def __init__(self, random: Random) -> None:
        self.num_damaged = 0
        self._random = random
        self._last = b""

    def __call__(self, message: bytes) -> bytes | None:
        earlier, self._last = self._last, message
        kind = self._random.choice(["whole"] * 6 + ["bit", "cut", "repeat", "lost"])
        if kind == "whole" or (kind == "repeat" and earlier == message):
            return message
        self.num_damaged += 1
        match kind:
            case "bit":
                damaged = bytearray(message)
                damaged[self._random.randrange(len(message))] ^= 1 << self._random.randrange(8)
                return bytes(damaged)
            case "cut":
                return message[: self._random.randrange(len(message))]
            case "repeat":
                return earlier
            case _:
                return None


@pytest.mark.parametrize("mode", MODES)
def test_damaged_blocks_give_right_tokens_or_a_typed_error(mode: dict[str, Any]) -> None:
    async def main() -> None:
        random, network = Random(7), FaultyNetwork()
        engines = [FakeEngine(num_blocks=256) for _ in range(2)]
        config = TransferConfig.model_validate({"lease_s": LEASE_S, **mode})
        ends = [FaultyEndpoint(network, name, engine.kv, config) for name, engine in zip("pd", engines, strict=True)]
        prefill = PrefillWorker("p", "127.0.0.1", engines[0], ends[0], PrefillConfig(token_budget=16), 0.5)
        decode = DecodeWorker("d", "127.0.0.1", engines[1], ends[1], DecodeConfig(), 0.5)
        damage = network.wire("p", "d").damage = Damage(random)
        prompts = [[random.randrange(1000) for _ in range(random.randrange(1, 60))] for _ in range(NUM_REQUESTS)]
        try:
            await prefill.serve()
            await decode.serve()
            async with Gateway(decode.address) as gateway:
                for number, prompt in enumerate(prompts):
                    await gateway.start(f"r{number}", prompt, prefill, max_tokens=6)
                    if number % 8 == 7:
                        await gateway.over(*(f"r{earlier}" for earlier in range(number + 1)))
                answers = await gateway.over(*(f"r{number}" for number in range(NUM_REQUESTS)))
                for worker in (prefill, decode):
                    await until_changed(worker, lambda worker=worker: is_at_rest(worker))  # type: ignore[misc]
        finally:
            await decode.stop(0.0)
            await prefill.stop(0.0)

        failed = [answer for answer in answers if answer.error is not None]
        for prompt, answer in zip(prompts, answers, strict=True):
            want = fake_continuation(prompt, 6)
            if answer.error is None:
                assert answer.tokens == want
            else:
                assert isinstance(answer.error, BatonError)
                assert answer.tokens == want[: len(answer.tokens)]
        assert 0 < len(failed) < NUM_REQUESTS
        assert damage.num_damaged >= len(failed)
        assert all(engine.kv_faults == [] for engine in engines)
        assert all(engine.pool.num_used == 0 for engine in engines)

    asyncio.run(main())
