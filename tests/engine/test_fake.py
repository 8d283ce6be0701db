"""The fake engine continues from the KV bytes it finds: right bytes give the known tokens, others are noticed."""

import subprocess
import sys

import pytest

from engine.fake import FakeEngine, fake_continuation
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk

PROMPT = [5, 6, 7, 8, 9, 10]


def _start(engine: FakeEngine, sampling: SamplingParams | None = None, num_blocks: int = 5) -> Sequence:
    sequence = Sequence.start("r", PROMPT, len(PROMPT), sampling or SamplingParams(), engine.layout.block_tokens)
    sequence.block_table = engine.pool.allocate(num_blocks)
    return sequence


def _run(engine: FakeEngine, sequence: Sequence, steps: int, chunk_tokens: int = 100) -> list[int]:
    for _ in range(steps):
        chunk = ScheduledChunk(sequence, min(chunk_tokens, sequence.num_uncomputed))
        engine.complete(chunk, engine.step([chunk])[0])
    return sequence.token_ids[len(PROMPT) :]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
def test_tokens_do_not_depend_on_chunks(chunk_tokens: int) -> None:
    engine = FakeEngine()
    sequence = _start(engine)
    num_chunks = -(-len(PROMPT) // chunk_tokens)

    output = _run(engine, sequence, num_chunks + 7, chunk_tokens)

    assert output == fake_continuation(PROMPT, 8)
    assert engine.kv_faults == []
    assert engine.num_computed_tokens == len(PROMPT) + 7


def test_random_tokens_follow_from_seed_and_position() -> None:
    rules = SamplingParams(temperature=1.0, seed=11)

    engine = FakeEngine()

    output = _run(engine, _start(engine, rules), 6)
    assert output == fake_continuation(PROMPT, 6, seed=11)
    assert output[2:] == fake_continuation(PROMPT + output[:2], 4, num_prompt_tokens=len(PROMPT), seed=11)
    assert output != fake_continuation(PROMPT, 6, seed=12)


def test_blocks_copied_to_another_engine_continue_there() -> None:
    source, target = FakeEngine(), FakeEngine()
    first = _start(source)
    _run(source, first, 1)
    target.pool.allocate(3)
    moved = _start(target)
    size = source.layout.block_bytes
    for mine, theirs in zip(moved.block_table, first.block_table, strict=True):
        target.kv.buffer[mine * size : (mine + 1) * size] = source.kv.buffer[theirs * size : (theirs + 1) * size]
    target.advance(moved, len(PROMPT))
    moved.append(first.token_ids[-1], 4)

    assert _run(target, moved, 4) == fake_continuation(PROMPT, 5)
    assert target.kv_faults == []


@pytest.mark.parametrize("byte", range(0, 16, 3))
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kv", [0, 1])
def test_one_wrong_byte_of_an_earlier_token_is_noticed_and_changes_the_tokens(layer: int, kv: int, byte: int) -> None:
    engine = FakeEngine()
    sequence = _start(engine)
    _run(engine, sequence, 1)
    position = 2
    start = sequence.block_table[0] * engine.layout.block_bytes + layer * engine.layout.layer_bytes
    engine.kv.buffer[start + kv * engine.layout.layer_bytes // 2 + position * 16 + byte] ^= 1

    output = _run(engine, sequence, 2)

    assert "first at position 2" in engine.kv_faults[0]
    assert output[1:] != fake_continuation(PROMPT, 3)[1:]


def test_kv_of_another_prompt_is_noticed() -> None:
    engine = FakeEngine()
    sequence = _start(engine)
    foreign = Sequence.start("f", [1, 2, 3, 4, 5, 6], 6, SamplingParams(), 4)
    foreign.block_table = engine.pool.allocate(2)
    _run(engine, foreign, 1)
    sequence.block_table[0] = foreign.block_table[0]
    sequence.num_computed = 4

    _run(engine, sequence, 1)

    assert len(engine.kv_faults) == 1


def test_a_hook_sees_each_batch_before_it_runs() -> None:
    seen: list[int] = []
    engine = FakeEngine(on_step=lambda batch: seen.extend(chunk.num_tokens for chunk in batch))

    _run(engine, _start(engine), 3)

    assert seen == [6, 1, 1]


def test_a_hook_that_raises_leaves_the_engine_usable() -> None:
    failures = [RuntimeError("boom")]

    def fail_once(_: object) -> None:
        if failures:
            raise failures.pop()

    engine = FakeEngine(on_step=fail_once)
    sequence = _start(engine)
    with pytest.raises(RuntimeError, match="boom"):
        _run(engine, sequence, 1)

    assert _run(engine, sequence, 2) == fake_continuation(PROMPT, 2)


def test_the_fake_and_the_facade_do_without_torch() -> None:
    code = "import sys, engine.fake, engine.engine; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
