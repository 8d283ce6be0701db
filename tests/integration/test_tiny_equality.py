"""For each family, any cache state, any alignment of prompt, block and chunk: the tokens are Hugging Face's."""

import asyncio
import random
from pathlib import Path

import pytest

from engine.tiny import make_tiny_model
from tests.integration.asking import Answer, Asker, Oracle, greedy, request
from tests.integration.local_cluster import local_cluster

BLOCK = 8
NEW_TOKENS = 12


@pytest.mark.slow
@pytest.mark.parametrize("is_disaggregated", [True, False], ids=["disaggregated", "colocated"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"])
def test_a_family_equals_the_reference(tmp_path: Path, family: str, is_disaggregated: bool) -> None:
    model_dir = make_tiny_model(tmp_path / family, family)
    oracle = Oracle(model_dir)
    rng = random.Random(3)
    base = [rng.randrange(4, oracle.vocab_tokens) for _ in range(100)]
    # Cold, then full hits, then partial hits that branch off in the middle of a block and at its border.
    prompts = [base[:length] for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1)]
    prompts += [base[:64], base[:64], base[:60] + base[:20], base[: 4 * BLOCK] + base[1:30], base]

    async def scenario(chunk_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        async with (
            local_cluster(
                model_dir,
                num_prefill=1 if is_disaggregated else 0,
                num_decode=1,
                block_tokens=BLOCK,
                chunk_tokens=chunk_tokens,
            ) as cluster,
            Asker(cluster.address) as asker,
        ):
            alone = [await asker.ask(request(prompt, greedy(NEW_TOKENS))) for prompt in prompts]
            together = await asker.ask_all([request(prompt, greedy(NEW_TOKENS)) for prompt in reversed(prompts)])
            await asker.quiet_status()
            return [answer.token_ids for answer in alone], [answer.token_ids for answer in reversed(together)]

    expected = [oracle.generate(prompt, NEW_TOKENS) for prompt in prompts]
    for chunk_tokens in (16, 13, 256):
        alone, together = asyncio.run(scenario(chunk_tokens))
        assert alone == expected, f"one by one, chunks of {chunk_tokens}"
        assert together == expected, f"all at once, chunks of {chunk_tokens}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_prefill", "num_decode"), [pytest.param(1, 3, id="held by prefill"), pytest.param(3, 1, id="held by decode")]
)
@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_prefix_held_on_one_side_only_is_used_and_right(
    tmp_path: Path, num_prefill: int, num_decode: int, transport: str
) -> None:
    model_dir = make_tiny_model(tmp_path / "llama")
    oracle = Oracle(model_dir)
    prompt = [7 + number % 250 for number in range(5 * BLOCK)]
    prompts = [prompt, prompt, prompt[: 3 * BLOCK + 3] + [9] * 20]

    async def scenario() -> list[Answer]:
        async with (
            local_cluster(
                model_dir, num_prefill, num_decode, BLOCK, policy="round_robin", transport=transport
            ) as cluster,
            Asker(cluster.address) as asker,
        ):
            answers = [await asker.ask(request(prompt, greedy(NEW_TOKENS))) for prompt in prompts]
            await asker.quiet_status()
            return answers

    answers = asyncio.run(scenario())

    assert [answer.token_ids for answer in answers] == [oracle.generate(prompt, NEW_TOKENS) for prompt in prompts]
    cached = [answer.finished.usage.cached_tokens for answer in answers if answer.finished]
    assert cached == ([0, 4 * BLOCK, 3 * BLOCK] if num_prefill == 1 else [0, 0, 0]), "what prefill reused"
    assert {answer.finished.placement.transport for answer in answers if answer.finished} == {transport}
