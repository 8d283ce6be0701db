"""Tiny models of every shape, and a way to run token lists through a backend and a dense reference."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from common.config import EngineConfig
from engine.batch import Batch, Segment
from engine.cpu.backend import CpuBackend
from engine.cpu.build import Isa, supported_isas
from engine.kv_cache import KVCache
from kvtransfer.layout import BlockLayout

POOL_BLOCKS = 96


class Chunk(NamedTuple):
    """Tokens of one sequence that a step computes: from `start`, into the blocks of `table`."""

    token_ids: list[int]
    start: int
    table: list[int]
    is_prompt: bool = False
    """Whether a token that is alone belongs to a prompt; several always do."""


class Harness:
    """A backend with a pool. Every row's logits are returned."""

    def __init__(
        self, folder: Path, weights: str, isa: Isa, threads: int, kv_dtype: str | None, block_tokens: int
    ) -> None:
        name, _, activations = weights.partition("/")  # "q4/int8": 4-bit weights behind 8-bit activations
        config = EngineConfig.model_validate(
            {"weights": name, "threads": threads, "activations": activations or "int16"}
        )
        self.backend = CpuBackend.load(folder, config, isa)
        facts = self.backend.facts
        self.block_tokens = block_tokens
        dtype = kv_dtype or facts.kv_dtypes[0]
        shape = (facts.num_layers, facts.num_kv_heads, facts.head_dim)
        self.kv = KVCache(BlockLayout("tiny", dtype, block_tokens, *shape), POOL_BLOCKS)
        self.backend.attach(self.kv)

    def run(self, *pieces: tuple[Any, ...]) -> list[torch.Tensor]:
        """Run one step of Chunk pieces; return [num_rows, vocab] logits of each."""
        batch = self.batch(*pieces).asking_all()
        logits = self.backend.forward(batch).logits
        return [logits[s.first_row : s.first_row + s.num_rows].clone() for s in batch.segments]

    def batch(self, *pieces: tuple[Any, ...]) -> Batch:
        """Return a step of Chunk pieces that asks for nothing."""
        chunks = [Chunk(*piece) for piece in pieces]
        bs, width = self.block_tokens, max(len(c.table) for c in chunks)
        segments: list[Segment] = []
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            is_decode = len(chunk.token_ids) == 1 and not chunk.is_prompt
            segments.append(Segment(len(positions), len(chunk.token_ids), chunk.start, is_decode))
            places = range(chunk.start, chunk.start + len(chunk.token_ids))
            positions += places
            slots += [chunk.table[p // bs] * bs + p % bs for p in places]
        tables = [c.table + c.table[:1] * (width - len(c.table)) for c in chunks]
        return Batch(
            torch.tensor([t for c in chunks for t in c.token_ids]),
            torch.tensor(positions),
            torch.tensor(slots),
            tuple(segments),
            torch.tensor(tables, dtype=torch.int32),
            torch.arange(0),
            torch.arange(0),
        )

    def close(self) -> None:
        self.backend.close()
        self.kv.close()


Make = Callable[..., Harness]


@pytest.fixture
def make() -> Iterator[Make]:
    """Build harnesses that are closed after the test."""
    made: list[Harness] = []

    def build(
        folder: Path,
        weights: str = "fp32",
        isa: Isa | None = None,
        threads: int = 2,
        kv_dtype: str | None = None,
        block_tokens: int = 16,
    ) -> Harness:
        harness = Harness(folder, weights, isa or supported_isas()[0], threads, kv_dtype, block_tokens)
        made.append(harness)
        return harness

    yield build
    for harness in made:
        harness.close()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a random model of a transformers config and returns its folder."""

    def write(family: str, **shape: Any) -> Path:
        defaults: dict[str, Any] = {
            "vocab_size": 160,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
        config = getattr(transformers, f"{family}Config")(**{**defaults, **shape})
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.copy_(torch.randn(weight.shape) * 1.5 / weight.shape[1] ** 0.5)
                elif weight.ndim == 1:
                    weight.add_(torch.randn(weight.shape) * 0.1)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def dense() -> Callable[[Path, list[int]], torch.Tensor]:
    """Return a function that gives transformers' own fp32 logits [T, vocab] of a token list."""
    transformers.utils.logging.disable_progress_bar()
    loaded: dict[Path, Any] = {}

    def logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
        if folder not in loaded:
            loaded[folder] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            result: torch.Tensor = loaded[folder](torch.tensor([token_ids])).logits[0]
        return result

    return logits
