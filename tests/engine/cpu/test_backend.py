"""The fused step equals the dense model, whatever the family, shape, instruction set, chunking and block tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import EngineConfig
from common.errors import ConfigError
from engine.cpu.backend import CpuBackend
from engine.cpu.build import Isa, supported_isas
from engine.tiny import FAMILIES

Make = Callable[..., Any]
Dense = Callable[[Path, list[int]], torch.Tensor]
POOL_BLOCKS = 96
ISAS = supported_isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="needs AVX2")

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "one head": ("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}),
    "head_dim 80": ("Llama", {"head_dim": 80, "hidden_size": 80, "intermediate_size": 72}),
    "head_dim 96, vocab 163": ("Llama", {"head_dim": 96, "vocab_size": 163}),
    "head_dim 128, group 7": ("Qwen2", {"head_dim": 128, "num_attention_heads": 7, "hidden_size": 96}),
    "head_dim 256, tied": ("Gemma", {"head_dim": 256, "tie_word_embeddings": True}),
    "tied, group 5": (
        "Llama",
        {"tie_word_embeddings": True, "num_attention_heads": 5, "head_dim": 32, "hidden_size": 80},
    ),
    "biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 72}),
    "attention biases, QK-norm": ("Qwen3", {"attention_bias": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "yarn": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
}


def tokens(count: int, vocab: int = 160, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def table_of(num_tokens: int, block_tokens: int = 16, seed: int = 2) -> list[int]:
    order: list[int] = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[: -(-num_tokens // block_tokens)]


def run_in_chunks(harness: Any, ids: list[int], sizes: list[int], table: list[int]) -> torch.Tensor:
    """Compute `ids` in chunks of the given sizes and the rest token by token."""
    outputs, at = [], 0
    for size in [*sizes, *[1] * (len(ids) - sum(sizes))]:
        outputs += harness.run((ids[at : at + size], at, table))
        at += size
    return torch.cat(outputs)


def spread(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return float(difference.abs().max() / reference.std())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fp32_equals_the_dense_model_for_every_family(
    make: Make, dense: Dense, tiny_model: Callable[[str], Path], family: str, isa: Isa
) -> None:
    folder, ids = tiny_model(family), tokens(90)

    got = run_in_chunks(make(folder, isa=isa), ids, [50, 30], table_of(90))

    assert spread(got - dense(folder, ids), dense(folder, ids)) < 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_equals_the_dense_model_for_odd_shapes(
    make: Make, dense: Dense, make_model: Callable[..., Path], shape: str, isa: Isa
) -> None:
    family, options = SHAPES[shape]
    folder, ids = make_model(family, **options), tokens(150)

    got = run_in_chunks(make(folder, isa=isa), ids, [133, 14], table_of(150))

    assert spread(got - dense(folder, ids), dense(folder, ids)) < 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 0.15), ("int8", 0.3)]
)
def test_long_contexts_cross_parts_and_tiles(
    make: Make, dense: Dense, make_model: Callable[..., Path], kv_dtype: str, tolerance: float, isa: Isa
) -> None:
    folder, ids = make_model("Mistral", sliding_window=150), tokens(400)

    got = run_in_chunks(make(folder, kv_dtype=kv_dtype, isa=isa), ids, [300, 90], table_of(400))

    assert spread(got - dense(folder, ids), dense(folder, ids)) < tolerance


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_a_pool_of_bytes_is_as_wide_as_its_layout_says(
    make: Make, tiny_model: Callable[[str], Path], block_tokens: int, isa: Isa
) -> None:
    harness, ids = make(tiny_model("llama"), kv_dtype="int8", isa=isa, block_tokens=block_tokens), tokens(block_tokens)
    pool = harness.kv.raw()

    harness.run((ids, 0, [7]))

    assert pool[7].count_nonzero() > 0.9 * pool.shape[1]
    assert pool[:7].count_nonzero() == pool[8:].count_nonzero() == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunking_and_block_table_gives_the_dense_logits(
    make: Make, dense: Dense, tiny_model: Callable[[str], Path], data: st.DataObject
) -> None:
    folder = tiny_model("gemma3")
    block_tokens = data.draw(st.sampled_from([1, 5, 16, 33]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
    blocks = data.draw(st.permutations(range(POOL_BLOCKS)))
    harness = make(folder, block_tokens=block_tokens, threads=data.draw(st.integers(1, 2)))
    ids = [tokens(n, seed=i) for i, n in enumerate(lengths)]
    tables = [list(blocks[i * 40 : i * 40 + 40]) for i in range(len(ids))]
    done, got = [0] * len(ids), [[] for _ in ids]  # type: list[int], list[list[torch.Tensor]]

    while any(d < len(x) for d, x in zip(done, ids, strict=True)):
        left = [i for i in range(len(ids)) if done[i] < len(ids[i])]
        sizes = [data.draw(st.integers(1, len(ids[i]) - done[i])) for i in left]
        pieces = [(ids[i][done[i] : done[i] + n], done[i], tables[i]) for i, n in zip(left, sizes, strict=True)]
        for i, n, out in zip(left, sizes, harness.run(*pieces), strict=True):
            got[i].append(out)
            done[i] += n
    harness.close()

    for x, outputs in zip(ids, got, strict=True):
        assert spread(torch.cat(outputs) - dense(folder, x), dense(folder, x)) < 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", ["fp32", "w8", "q4", "q4/int8"])
def test_logits_do_not_depend_on_the_rest_of_the_batch(
    make: Make, tiny_model: Callable[[str], Path], weights: str, isa: Isa
) -> None:
    harness = make(tiny_model("llama"), weights=weights, isa=isa)
    ids = [tokens(30 + i, seed=i) for i in range(16)]
    tables = [list(range(i * 4, i * 4 + 4)) for i in range(16)]

    alone = [harness.run((x[:20], 0, table))[0] for x, table in zip(ids, tables, strict=True)]
    alone_next = [harness.run((x[20:21], 20, table))[0] for x, table in zip(ids, tables, strict=True)]
    together = harness.run(*((x[:20], 0, table) for x, table in zip(ids, tables, strict=True)))
    together_next = harness.run(*((x[20:21], 20, table) for x, table in zip(ids, tables, strict=True)))

    assert torch.equal(torch.cat(alone), torch.cat(together))
    assert torch.equal(torch.cat(alone_next), torch.cat(together_next))


@pytest.mark.parametrize(
    ("weights", "kv_dtype"), [("fp32", None), ("w8", "int8"), ("q4", None), ("q4", "bfloat16"), ("q4/int8", None)]
)
def test_a_prompt_s_logits_do_not_depend_on_its_chunks(
    make: Make, tiny_model: Callable[[str], Path], weights: str, kv_dtype: str | None
) -> None:
    harness = make(tiny_model("mistral"), weights=weights, kv_dtype=kv_dtype)
    ids, table = tokens(300), table_of(300)

    whole = harness.run((ids, 0, table))[0]

    assert torch.equal(run_in_chunks(harness, ids, [2, 130, 35, 133], table), whole)


@pytest.mark.parametrize("weights", ["fp32", "w8", "q4"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_prompt_s_last_token_alone_gives_the_logits_of_the_whole(
    make: Make, tiny_model: Callable[[str], Path], weights: str, isa: Isa
) -> None:
    harness, ids, table = make(tiny_model("llama"), weights=weights, isa=isa), tokens(161), table_of(161)

    whole = harness.run((ids, 0, table))[0]
    last = harness.run((ids[160:], 160, table, True))[0]

    assert torch.equal(last[0], whole[160])


@pytest.mark.parametrize("weights", ["w8", "q4", "q4/int8"])
def test_instruction_sets_agree(make: Make, tiny_model: Callable[[str], Path], weights: str) -> None:
    folder, ids = tiny_model("gemma2"), tokens(40)

    results = [run_in_chunks(make(folder, weights=weights, isa=isa), ids, [39], table_of(40)) for isa in ISAS]

    for result in results[1:]:
        assert spread(result - results[0], results[0]) < (1e-3 if weights == "w8" else 3e-2)


def test_w8_is_close_to_fp32(make: Make, dense: Dense, tiny_model: Callable[[str], Path]) -> None:
    folder, ids = tiny_model("gemma2"), tokens(60)

    got = run_in_chunks(make(folder, weights="w8"), ids, [50], table_of(60)).log_softmax(-1)

    exact = dense(folder, ids).log_softmax(-1)
    assert float((exact.exp() * (exact - got)).sum(-1).mean()) < 2e-3


def test_auto_weights_are_w8_without_a_gguf(tiny_model: Callable[[str], Path]) -> None:
    backend = CpuBackend.load(tiny_model("qwen3"), EngineConfig())

    assert backend.facts.weights == "w8"
    assert backend.facts.kv_dtypes[0] == "float16"
    backend.close()
    backend.close()


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (([999], 0, [0]), "vocabulary"),
        (([1], 0, [POOL_BLOCKS]), "beyond the pool"),
        (([-1], 0, [0]), "vocabulary"),
    ],
    ids=["token too large", "block outside the pool", "negative token"],
)
def test_a_batch_that_points_outside_is_refused(
    make: Make, tiny_model: Callable[[str], Path], piece: tuple[list[int], int, list[int]], reason: str
) -> None:
    harness = make(tiny_model("llama"))

    with pytest.raises(ValueError, match=reason):
        harness.run(piece)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a model folder"):
        CpuBackend.load(tmp_path / "model.gguf", EngineConfig())
