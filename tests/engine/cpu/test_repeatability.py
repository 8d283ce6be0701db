"""A seeded answer is the same, bit for bit, however its prompt was cut, cached, batched, or moved between workers."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from common.config import EngineConfig
from engine.cpu.build import supported_isas
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk

pytestmark = pytest.mark.skipif(not supported_isas(), reason="needs AVX2")
NUM_NEW = 40
RULES = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)

Token = tuple[int, float | None]
"""Id and logprob: the logits' bits show in it."""


def load(folder: Path, weights: str) -> Engine:
    name, _, activations = weights.partition("/")  # "q4/int8": 4-bit weights behind 8-bit activations
    options = {"backend": "cpu", "weights": name, "activations": activations or "int16", "threads": 1, "pool_mib": 4}
    config = EngineConfig.model_validate(options)
    return Engine.load(folder, config, "tiny")


def answer(engine: Engine, token_ids: list[int], num_prompt: int, others: list[Sequence], rng: Random) -> list[Token]:
    """Generate after `token_ids` in chunks of random sizes, beside `others`; what the pool has cached is reused."""
    made: list[Token] = []
    block_tokens = engine.layout.block_tokens
    sequence = Sequence.start("one", token_ids, num_prompt, RULES, block_tokens)
    sequence.block_table = engine.pool.match(sequence.reusable_hashes(block_tokens))
    sequence.num_computed = len(sequence.block_table) * block_tokens
    while engine.finish_reason(sequence) is None:
        running = [sequence, *(other for other in others if engine.finish_reason(other) is None)]
        chunks = []
        for each in running:
            each.block_table += engine.pool.allocate(engine.blocks_for(each.num_tokens) - len(each.block_table))
            chunks.append(ScheduledChunk(each, rng.randint(1, each.num_uncomputed)))
        for chunk, output in zip(chunks, engine.step(chunks), strict=True):
            engine.complete(chunk, output)
            if output is not None and chunk.sequence is sequence:
                made.append((output.token_id, output.logprob))
    for each in (sequence, *others):
        engine.pool.release(each.block_table)
        each.block_table = []
    return made


@pytest.mark.parametrize("weights", ["fp32", "w8", "q4", "q4/int8"])
@pytest.mark.parametrize("num_prompt", [33, 47])
def test_a_seeded_answer_depends_on_nothing_but_prompt_and_seed(
    tiny_model: Callable[[str], Path], weights: str, num_prompt: int
) -> None:
    engine, rng = load(tiny_model("llama"), weights), Random(1)
    prompt = [rng.randrange(5, engine.vocab_tokens) for _ in range(num_prompt)]
    expected = answer(engine, prompt, num_prompt, [], rng)
    assert len({token_id for token_id, _ in expected}) > 5

    cached = answer(engine, prompt, num_prompt, [], rng)
    assert cached == expected
    for num_done in (1, 15, 17, 39):  # moved here with what was generated so far; its own pool holds none of it
        worker = load(tiny_model("llama"), weights)
        before = [token_id for token_id, _ in expected[:num_done]]
        assert answer(worker, prompt + before, num_prompt, [], rng) == expected[num_done:]
        worker.close()
    others = []
    for i in range(15):
        ids = [rng.randrange(5, engine.vocab_tokens) for _ in range(rng.randint(1, 60))]
        others.append(Sequence.start(str(i), ids, len(ids), RULES, engine.layout.block_tokens))
    assert answer(engine, prompt, num_prompt, others, rng) == expected

    engine.pool.check()
    assert engine.pool.num_used == 0
    engine.close()
