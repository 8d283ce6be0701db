"""The contract of a backend: its greedy tokens equal Hugging Face generate, however work is cut, batched or moved.

A new backend is one more parameter of `load`.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

from common.config import EngineConfig
from common.control_groups import usable_cores
from common.errors import ConfigError, InvalidRequestError
from common.tiny_text import VOCAB_TOKENS
from engine.cpu.build import supported_isas
from engine.engine import Engine, FinishReason
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import LayerWatch, ScheduledChunk
from engine.tiny import FAMILIES
from kvtransfer.memory import block_bytes_of
from tests.engine.cuda.on_cpu import engine_on_cpu
from tests.gpu.needs import require_gpu

BLOCK_TOKENS = 4
NUM_NEW = 12
GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(
    params=[
        "reference",
        pytest.param("cpu", marks=pytest.mark.skipif(not supported_isas(), reason="needs AVX2")),
        "cuda on the cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("reference on cuda", marks=pytest.mark.gpu),
    ]
)
def load(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """Return a function that loads a tiny model; at the end every block must be free or kept."""
    engines: list[Engine] = []

    def make(family: str = "llama", **settings: Any) -> Engine:
        base = {"backend": request.param.partition(" ")[0], "weights": "fp32", "kv_dtype": "float32"}
        if request.param == "reference on cuda":
            base["device"] = "cuda"
        config = EngineConfig(**{**base, "block_tokens": BLOCK_TOKENS, "pool_blocks": 128, "threads": 1, **settings})
        if request.param == "cuda on the cpu":
            engines.append(engine_on_cpu(tiny_model(family), family, config, is_in_device=True))
        else:
            engines.append(Engine.load(tiny_model(family), config, family))
        return engines[-1]

    if request.param in ("cuda", "reference on cuda"):
        require_gpu()

    yield make
    for engine in engines:
        engine.pool.check()
        assert engine.pool.num_used == 0
        engine.close()


@pytest.fixture(scope="session")
def generate(tiny_model: Callable[[str], Path]) -> Callable[[str, list[int]], list[int]]:
    """Return a function that continues a prompt with Hugging Face's own generate."""
    models: dict[str, Any] = {}

    def continue_with(family: str, prompt: list[int]) -> list[int]:
        if family not in models:
            models[family] = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32)
            models[family].generation_config.eos_token_id = None
            models[family].generation_config.pad_token_id = 0
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        out = models[family].generate(
            torch.tensor([prompt]), attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return continue_with


def kv_bytes(engine: Engine, block_id: int) -> bytes:
    with block_bytes_of(engine.kv, block_id) as block:
        return bytes(block)


def _prompt(num_tokens: int, seed: int = 0) -> list[int]:
    random = Random(seed * 1000 + num_tokens)
    return [random.randrange(4, VOCAB_TOKENS) for _ in range(num_tokens)]


def _start(engine: Engine, prompt: list[int], sampling: SamplingParams = GREEDY) -> Sequence:
    """Admit a sequence as a loop would: reuse what is cached, allocate the rest."""
    sequence = Sequence.start("r", prompt, len(prompt), sampling, BLOCK_TOKENS)
    sequence.block_table = engine.pool.match(sequence.reusable_hashes(BLOCK_TOKENS))
    sequence.num_computed = sequence.num_cached = len(sequence.block_table) * BLOCK_TOKENS
    missing = engine.blocks_for(len(prompt) + NUM_NEW) - len(sequence.block_table)
    sequence.block_table += engine.pool.allocate(missing)
    return sequence


def _finish(engine: Engine, *sequences: Sequence, chunk_tokens: int = 512) -> list[list[int]]:
    """Run all sequences to their end in one ragged batch; return their outputs."""
    running = list(sequences)
    while running:
        batch = [ScheduledChunk(s, min(chunk_tokens, s.num_uncomputed)) for s in running]
        for chunk, output in zip(batch, engine.step(batch), strict=True):
            engine.complete(chunk, output)
        running = [s for s in running if engine.finish_reason(s) is None]
    for sequence in sequences:
        engine.pool.release(sequence.block_table)
    return [s.token_ids[s.num_prompt_tokens :] for s in sequences]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_batched_chunked_and_cached_prompts_give_the_reference_tokens(
    family: str, load: Callable[..., Engine], generate: Callable[[str, list[int]], list[int]]
) -> None:
    engine = load(family)
    # Around block borders, and beyond the sliding window of 24 tokens.
    prompts = [_prompt(n) for n in (1, 2 * BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, 41)]
    expected = [generate(family, prompt) for prompt in prompts]

    assert _finish(engine, *[_start(engine, p) for p in prompts], chunk_tokens=BLOCK_TOKENS) == expected
    assert _finish(engine, *[_start(engine, p) for p in prompts], chunk_tokens=7) == expected
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert _finish(engine, _start(engine, prompt)) == [tokens]


@pytest.mark.parametrize("num_shared", [BLOCK_TOKENS, 5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 1])
def test_a_prefix_computed_for_another_sequence_changes_nothing(
    num_shared: int, load: Callable[..., Engine], generate: Callable[[str, list[int]], list[int]]
) -> None:
    engine = load()
    first = _prompt(6 * BLOCK_TOKENS)
    _finish(engine, _start(engine, first))

    prompt = first[:num_shared] + _prompt(6, seed=1)
    sequence = _start(engine, prompt)

    assert sequence.num_cached == num_shared // BLOCK_TOKENS * BLOCK_TOKENS
    assert _finish(engine, sequence) == [generate("llama", prompt)]


def test_the_answer_is_cached_for_the_next_turn(load: Callable[..., Engine]) -> None:
    engine = load()
    [answer] = _finish(engine, _start(engine, prompt := _prompt(8)))

    sequence = _start(engine, prompt + answer + _prompt(3, seed=2))

    # The last token of an answer is sampled but never computed.
    assert sequence.num_cached == (8 + NUM_NEW - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    engine.pool.release(sequence.block_table)


@pytest.mark.parametrize("threads", [1, 2])
def test_layers_are_final_when_a_step_says_so(load: Callable[..., Engine], threads: int) -> None:
    engine = load(threads=threads)
    sequences = [_start(engine, _prompt(num_tokens)) for num_tokens in (2 * BLOCK_TOKENS, 41)]
    blocks = [block for sequence in sequences for block in sequence.block_table]
    layout = engine.layout
    seen: list[tuple[int, list[bytes]]] = []

    def first_layers(num_layers: int) -> list[bytes]:
        return [kv_bytes(engine, block)[: num_layers * layout.layer_bytes] for block in blocks]

    watch = LayerWatch((1, 2), lambda num_layers: seen.append((num_layers, first_layers(num_layers))))
    engine.step([ScheduledChunk(sequence, sequence.num_uncomputed) for sequence in sequences], watch)

    assert seen == [(1, first_layers(1)), (2, first_layers(2))]
    assert any(any(block) for block in first_layers(1))
    for sequence in sequences:
        engine.pool.release(sequence.block_table)


def test_a_sequence_goes_on_in_another_engine_from_blocks_copied_there(
    load: Callable[..., Engine], generate: Callable[[str, list[int]], list[int]]
) -> None:
    prefill, decode = load(), load()
    source = _start(prefill, prompt := _prompt(10))
    [output] = prefill.step([ScheduledChunk(source, 10)])
    assert output is not None

    decode.pool.allocate(5)
    moved = _start(decode, prompt)
    for mine, theirs in zip(moved.block_table[:3], source.block_table[:3], strict=True):
        with block_bytes_of(decode.kv, mine, is_written=True) as block:
            block[:] = kv_bytes(prefill, theirs)
    decode.advance(moved, 10)
    moved.append(output.token_id, BLOCK_TOKENS)

    assert _finish(decode, moved) == [generate("llama", prompt)]
    assert decode.pool.peek(moved.hashes) == 5
    prefill.pool.release(source.block_table)
    decode.pool.release(range(5))


def test_step_changes_no_sequence_and_gives_tokens_only_at_the_end_of_a_prompt(load: Callable[..., Engine]) -> None:
    engine = load()
    sequence = _start(engine, _prompt(10))
    before = (list(sequence.token_ids), list(sequence.block_table), sequence.num_computed)

    outputs = engine.step([ScheduledChunk(sequence, 9)])

    assert outputs == [None]
    assert (sequence.token_ids, sequence.block_table, sequence.num_computed) == before
    assert engine.step([]) == []
    engine.pool.release(sequence.block_table)


def test_what_a_block_held_before_does_not_matter_even_if_it_is_not_finite(
    load: Callable[..., Engine], generate: Callable[[str, list[int]], list[int]]
) -> None:
    engine = load()
    engine.kv.raw()[:] = 0xFF
    prompts = [_prompt(n) for n in (3, 5, 6, 7, 30)]

    outputs = _finish(engine, *[_start(engine, prompt) for prompt in prompts])

    assert outputs == [generate("llama", prompt) for prompt in prompts]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_a_pool_of_half_the_bytes_gives_nearly_the_same_logprobs(load: Callable[..., Engine], kv_dtype: str) -> None:
    rules = SamplingParams(max_tokens=1, logprobs=0)
    chosen = []
    for engine in (load(), load(kv_dtype=kv_dtype)):
        sequence = _start(engine, _prompt(20), rules)
        # Two chunks, so that the second reads the first from the pool.
        engine.complete(chunk := ScheduledChunk(sequence, 16), engine.step([chunk])[0])
        [output] = engine.step([ScheduledChunk(sequence, 4)])
        engine.pool.release(sequence.block_table)
        assert output is not None
        chosen.append((output.token_id, output.logprob))

    assert chosen[0][0] == chosen[1][0]
    assert chosen[1][1] == pytest.approx(chosen[0][1], abs=0.2)


def test_torch_starts_no_threads_beside_those_of_the_kernels(load: Callable[..., Engine]) -> None:
    """OpenMP's threads spin after their work, on the cores that the kernels' next step needs."""
    engine = load(threads=2)

    def compute() -> int:
        _finish(engine, _start(engine, _prompt(9)))
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as compute_thread:
        expected = 1 if engine.backend == "cpu" else min(2, usable_cores())
        assert compute_thread.submit(compute).result() == expected


def _after(num_output: int, last: int, **rules: Any) -> Sequence:
    tokens = [5] * 4 + [7] * (num_output - 1) + [last]
    return Sequence.start("r", tokens, 4, SamplingParams(**rules), BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        pytest.param(_after(2, 7), None, id="goes on"),
        pytest.param(_after(2, 0), FinishReason.FINISH_REASON_STOP, id="end of sequence"),
        pytest.param(_after(2, 3), FinishReason.FINISH_REASON_STOP, id="second end of sequence"),
        pytest.param(_after(2, 0, ignore_eos=True), None, id="end of sequence ignored"),
        pytest.param(_after(2, 9, stop_token_ids=frozenset({9})), FinishReason.FINISH_REASON_STOP, id="stop token"),
        pytest.param(_after(2, 0, min_tokens=3), None, id="too early to stop"),
        pytest.param(_after(3, 0, min_tokens=3), FinishReason.FINISH_REASON_STOP, id="may stop"),
        pytest.param(_after(2, 7, max_tokens=2), FinishReason.FINISH_REASON_LENGTH, id="length"),
        pytest.param(_after(3, 7, max_tokens=2), FinishReason.FINISH_REASON_LENGTH, id="it came here with more"),
        pytest.param(_after(2, 0, max_tokens=2), FinishReason.FINISH_REASON_STOP, id="stop wins over length"),
        pytest.param(_after(508, 7), FinishReason.FINISH_REASON_LENGTH, id="context window"),
        pytest.param(Sequence.start("r", [0], 1, SamplingParams(), 4), None, id="a prompt that ends with a stop token"),
    ],
)
def test_a_sequence_ends_for_the_first_reason_that_holds(
    load: Callable[..., Engine], sequence: Sequence, reason: "FinishReason.ValueType | None"
) -> None:
    assert load().finish_reason(sequence) == reason


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "prompt is empty"),
        ([5] * 512, "prompt has 512 tokens, no room in the context window of 512"),
        ([5] * 64, "prompt needs 17 blocks, the pool has 16"),
        ([5, VOCAB_TOKENS], rf"token ids must be in \[0, {VOCAB_TOKENS}\), got {VOCAB_TOKENS}"),
        ([-1, 5], "got -1"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_in_words(
    load: Callable[..., Engine], tokens: list[int], words: str
) -> None:
    engine = load(pool_blocks=16)

    with pytest.raises(InvalidRequestError, match=words):
        engine.check_request(tokens, SamplingParams())


def test_a_window_that_the_model_lacks_is_refused_in_words(tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(backend="reference", pool_blocks=8, context_tokens=513)

    with pytest.raises(ConfigError, match=r"engine\.context_tokens=513 is more than the model's window of 512"):
        Engine.load(tiny_model("llama"), config, "tiny")


def test_a_weight_format_that_the_backend_lacks_is_refused_in_words(load: Callable[..., Engine]) -> None:
    refused = []
    for weights in ("bf16", "q4"):  # no backend has both
        try:
            load(weights=weights)
        except ConfigError as error:
            refused.append(error.message)

    [message] = refused
    assert re.search(r"engine\.weights=(bf16|q4) is not available here, only ", message)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sequences_whose_logits_nobody_needs_get_the_same_tokens_beside_those_that_need_them(
    family: str, load: Callable[..., Engine], generate: Callable[[str, list[int]], list[int]]
) -> None:
    engine = load(family)
    rules: dict[str, Any] = {"max_tokens": NUM_NEW, "ignore_eos": True}
    prompts = [_prompt(num_tokens) for num_tokens in (9, 5, 17, 30, 6)]
    kinds = [
        GREEDY,
        SamplingParams(**rules, logprobs=1),
        SamplingParams(**rules, min_tokens=NUM_NEW // 2),
        SamplingParams(**rules, temperature=1.0, top_k=1),
        GREEDY,
    ]
    sequences = [_start(engine, prompt, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    assert [sequence.needs_logits for sequence in sequences] == [False, True, True, True, False]

    assert _finish(engine, *sequences) == [generate(family, prompt) for prompt in prompts]
    assert not sequences[2].needs_logits  # since it has its least number of tokens


@pytest.mark.parametrize(("backend", "device"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_device_that_the_backend_is_not_made_for_is_refused_in_words(
    backend: str, device: str, tiny_model: Callable[[str], Path]
) -> None:
    config = EngineConfig.model_validate({"backend": backend, "device": device})

    with pytest.raises(ConfigError, match=rf"backend {backend}: engine\.device={device} is not possible here, only"):
        Engine.load(tiny_model("llama"), config, "tiny")


def test_rules_that_shape_the_tokens_reach_the_sampler(load: Callable[..., Engine]) -> None:
    engine = load()
    rules = SamplingParams(max_tokens=NUM_NEW, temperature=1.0, seed=3, logit_bias={17: 1000.0}, logprobs=2)
    sequence = _start(engine, _prompt(5), rules)

    [output] = engine.step([ScheduledChunk(sequence, 5)])

    assert output is not None
    assert output.token_id == 17
    assert output.logprob is not None
    assert [logprob for _, logprob in output.top] == sorted((p for _, p in output.top), reverse=True)
    engine.pool.release(sequence.block_table)
