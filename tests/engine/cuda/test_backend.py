"""What the backend for GPUs adds: decode by fixed shapes, one device for every tensor, and no look at a value.

That its tokens are Hugging Face's is in tests/engine/test_engine.py.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from common.config import EngineConfig, TransferConfig
from common.errors import ConfigError
from engine.attention.paged import AttentionPlan, PagedPool
from engine.backend import load_backend
from engine.batch import Segment
from engine.batch_rules import Filters
from engine.cuda.backend import CudaBackend, row_logits
from engine.cuda.decode import DecodeStep, is_decode_step
from engine.cuda.pool import DevicePool
from engine.engine import Engine
from engine.kv_cache import KVCache
from engine.reference import ATTENTION_NAME, ReferenceBackend
from engine.sampler import Sampler, draw
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step import ScheduledChunk
from engine.tiny import FAMILIES
from kvtransfer.endpoint import TransferEndpoint
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import block_bytes_of
from tests.engine.cuda.batches import BLOCK_TOKENS, POOL_BLOCKS, decode_batch, layout_of
from tests.engine.cuda.on_cpu import CPU, engine_on_cpu, fake_device

ELSEWHERE = "meta"
"""A device that is not the CPU: its tensors have shapes and types but no values, so that a look at one is an error."""
Pair = Callable[[str], tuple[Any, Any, Any, Any]]


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[[str], Path]) -> Iterator[Pair]:
    """Return a function that gives both backends of a family with their pools."""
    made: dict[str, tuple[Any, Any, Any, Any]] = {}

    def load(family: str) -> tuple[Any, Any, Any, Any]:
        if family not in made:
            reference = ReferenceBackend.load(tiny_model(family), EngineConfig())
            cuda = CudaBackend.load(tiny_model(family), EngineConfig(weights="fp32"), CPU)
            pools = (
                KVCache(layout_of(reference), POOL_BLOCKS),
                DevicePool(layout_of(cuda), POOL_BLOCKS, "cpu", fake_device),
            )
            reference.attach(pools[0])
            cuda.attach(pools[1])
            made[family] = (reference, cuda, *pools)
        return made[family]

    yield load
    for reference, cuda, *pools in made.values():
        for each in (reference, cuda, *pools):
            each.close()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 45), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_a_decode_step_of_any_shape_equals_the_reference(
    pair: Pair, family: str, lengths: list[int], seed: int
) -> None:
    reference, cuda, kv, pool = pair(family)
    content = torch.randn(kv.tensor().shape, generator=torch.Generator().manual_seed(seed))
    kv.tensor()[:] = content
    pool.tensor()[:] = content
    batch = decode_batch(lengths, Random(seed))

    expected, got = reference.forward(batch).logits, cuda.forward(batch).logits

    assert torch.allclose(got, expected, atol=1e-3, rtol=1e-3)
    assert torch.allclose(pool.tensor(), kv.tensor(), atol=1e-3, rtol=1e-3)  # nothing was written elsewhere


def test_what_lies_beyond_a_sequence_does_not_matter_even_if_it_is_not_finite(pair: Pair) -> None:
    _, cuda, _, pool = pair("llama")
    batch = decode_batch([0, 6, 9], Random(1))
    outcomes = []
    for filler in (0.0, torch.nan):
        pool.tensor()[:] = filler
        for segment, table in zip(batch.segments, batch.block_tables.tolist(), strict=True):
            for place in range(segment.num_context):
                pool.tensor()[table[place // BLOCK_TOKENS], :, :, place % BLOCK_TOKENS] = 0.25
        outcomes.append(cuda.forward(batch).logits)

    assert torch.equal(*outcomes)
    assert outcomes[0].isfinite().all()


def test_only_steps_of_generated_tokens_alone_have_a_fixed_shape() -> None:
    batch = decode_batch([3, 4], Random(2))

    assert is_decode_step(batch)
    assert not is_decode_step(replace(batch, segments=(Segment(0, 1, 3, is_decode=True), Segment(1, 1, 4))))
    assert not is_decode_step(replace(batch, segments=(Segment(0, 2, 3),)))


COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype_layout, torch.ops.aten.copy_.default)


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no operation mix devices, but for copies, which it counts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_flatten((args, kwargs, result))[0] if isinstance(each, torch.Tensor)]
        if len({each.device.type for each in tensors}) > 1:
            assert func in COPIES, f"{func} mixes devices"
            self.copies += 1
        return result


class PoolElsewhere(NamedTuple):
    """A pool elsewhere."""

    layout: BlockLayout

    def tensor(self) -> torch.Tensor:
        layout = self.layout
        shape = (POOL_BLOCKS, layout.num_layers, 2, BLOCK_TOKENS, layout.num_kv_heads, layout.head_dim)
        return torch.zeros(shape, dtype=torch.bfloat16, device=ELSEWHERE)


def elsewhere(folder: Path) -> tuple[Any, Any]:
    """Return a model and a pool on a device that is not the CPU."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(ELSEWHERE):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pool: Any = PoolElsewhere(BlockLayout("m", "bfloat16", BLOCK_TOKENS, config.num_hidden_layers, heads, dim))
    return model.eval().requires_grad_(False), pool


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_decode_step_on_a_gpu_copies_its_inputs_once_and_never_waits(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    with torch.inference_mode():
        model, pool = elsewhere(tiny_model(family))
        step = DecodeStep(4, 8, PagedPool(pool), partial(row_logits, model), graphs=None)

        with OneDevice() as mode:
            logits = step.run(decode_batch([3, 17, 30], Random(1)))  # an operation that needs a value raises here

        assert (logits.device.type, logits.shape[0], mode.copies) == (ELSEWHERE, 4, 1)


@pytest.mark.parametrize("kind", [ReferenceBackend, CudaBackend])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_whole_step_mixes_no_devices(tiny_model: Callable[[str], Path], family: str, kind: Any) -> None:
    model, pool = elsewhere(tiny_model(family))
    backend = kind(model, "bf16", torch.device(ELSEWHERE))
    backend.attach(pool)
    batch = decode_batch([3, 17, 30], Random(1))
    segments = (*batch.segments[:2], Segment(2, 1, 30))  # a decode and a chunk of a prompt
    batch = replace(batch, segments=segments, logit_rows=torch.tensor([2, 0]), greedy_rows=torch.tensor([1]))

    with OneDevice():
        logits, winners = backend.forward(batch)

    assert {logits.device.type, winners.device.type} == {ELSEWHERE}
    assert (logits.shape[0], winners.shape, logits.dtype) == (2, (1,), torch.float32)
    assert backend.facts.device == ELSEWHERE


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_chunk_of_a_prompt_finds_all_it_needs_on_the_gpu(tiny_model: Callable[[str], Path], family: str) -> None:
    with torch.inference_mode():
        model, pool = elsewhere(tiny_model(family))
        batch = decode_batch([30], Random(1))
        rows = torch.arange(20)
        chunk = replace(
            batch,
            token_ids=rows + 4,
            positions=rows + 11,
            slots=rows,
            segments=(Segment(0, 20, 11),),
            logit_rows=rows[-1:],
        )

        plan, ids, positions = (
            AttentionPlan.of(chunk, PagedPool(pool)),
            chunk.token_ids.to(ELSEWHERE),
            chunk.positions.to(ELSEWHERE),
        )

        with OneDevice() as mode:
            logits = row_logits(model, ids, positions, plan)

        assert (logits.device.type, mode.copies) == (ELSEWHERE, 0)


def test_sampling_works_where_the_logits_are() -> None:
    rules = [
        SamplingParams(temperature=0.7, top_k=5, min_p=0.1, seed=1),
        SamplingParams(temperature=1.3, min_tokens=4, logit_bias={3: 1.5}),
        SamplingParams(temperature=0.0, logprobs=2),
    ]
    sequences = [Sequence.start("r", [5, 6, 7], 2, params, BLOCK_TOKENS) for params in rules]
    logits = torch.zeros(3, 50, device=ELSEWHERE)

    with OneDevice():
        filters = Filters.of(rules[:2], 50, logits.device)
        assert draw(logits[:2], filters, np.array([0.1, 0.2])).device.type == ELSEWHERE
        with pytest.raises(NotImplementedError, match="meta tensor"):  # all that is left is to read the tokens
            Sampler(frozenset({2})).sample(logits, sequences)


def test_blocks_of_a_pool_in_a_gpu_are_what_its_tensor_says(pair: Pair) -> None:
    _, _, kv, pool = pair("llama")
    pool.tensor()[:] = torch.randn(pool.tensor().shape)
    kv.tensor()[:] = pool.tensor()

    for block in (0, 7, POOL_BLOCKS - 1):
        with block_bytes_of(pool, block) as ours, block_bytes_of(kv, block) as theirs:
            assert bytes(ours) == bytes(theirs)
    assert (len(pool.buffer), pool.memfd) == (0, None)


def test_tokens_follow_the_blocks_from_one_gpu_pool_to_another(tiny_model: Callable[[str], Path]) -> None:
    config = EngineConfig(weights="fp32", block_tokens=BLOCK_TOKENS, pool_blocks=32)
    prompt = [(7 * i) % 200 + 4 for i in range(22)]
    folder = tiny_model("qwen3")
    prefill, decode, alone = (engine_on_cpu(folder, "m", config, is_in_device=True) for _ in range(3))

    def start(engine: Engine) -> Sequence:
        sequence = Sequence.start("r", prompt, len(prompt), SamplingParams(max_tokens=8, ignore_eos=True), BLOCK_TOKENS)
        sequence.block_table = engine.pool.allocate(engine.blocks_for(len(prompt) + 8))
        return sequence

    def finish(engine: Engine, sequence: Sequence) -> list[int]:
        while engine.finish_reason(sequence) is None:
            chunk = ScheduledChunk(sequence, sequence.num_uncomputed)
            engine.complete(chunk, engine.step([chunk])[0])
        return sequence.token_ids[len(prompt) :]

    async def move(sources: list[int], targets: list[int]) -> None:
        sender = await TransferEndpoint.start("p", "127.0.0.1", prefill.kv, TransferConfig(transport="tcp"))
        receiver = await TransferEndpoint.start("d", "127.0.0.1", decode.kv, TransferConfig(transport="tcp"))
        try:
            async with asyncio.timeout(20):
                landing = receiver.grant(targets, 0)
                push = await sender.open_push(landing.ticket)
                push.announce(0, sources)
                await asyncio.gather(push.finish(), landing.landed())
        finally:
            await sender.close()
            await receiver.close()

    decode.pool.allocate(3)
    source, moved = start(prefill), start(decode)
    [first] = prefill.step([ScheduledChunk(source, len(prompt))])
    assert first is not None
    count = decode.blocks_for(len(prompt))
    asyncio.run(move(source.block_table[:count], moved.block_table[:count]))
    decode.advance(moved, len(prompt))
    moved.append(first.token_id, BLOCK_TOKENS)

    assert finish(decode, moved) == finish(alone, start(alone))
    for engine in (prefill, decode, alone):
        engine.close()


def test_where_torch_sees_no_gpu_the_backend_says_so_and_auto_passes_it_over(tiny_model: Callable[[str], Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    folder = tiny_model("llama")

    for config in (EngineConfig(backend="cuda"), EngineConfig(backend="reference", device="cuda")):
        with pytest.raises(ConfigError, match=f"backend {config.backend}: torch sees no GPU here"):
            load_backend(folder, config)
    name, backend, _ = load_backend(folder, EngineConfig(weights="fp32"))

    assert name != "cuda"
    backend.close()


@pytest.mark.parametrize(("asked", "weights", "kv_dtype"), [("auto", "bf16", "bfloat16"), ("fp16", "fp16", "float16")])
def test_weights_and_kv_are_half_precision_unless_asked_for_otherwise(
    tiny_model: Callable[[str], Path], asked: str, weights: str, kv_dtype: str
) -> None:
    backend = CudaBackend.load(tiny_model("llama"), EngineConfig.model_validate({"weights": asked}), CPU)

    assert (backend.facts.weights, backend.facts.kv_dtypes[0]) == (weights, kv_dtype)
    backend.attach(KVCache(layout_of(backend, kv_dtype), POOL_BLOCKS))
    logits = backend.forward(decode_batch([0, 0], Random(1))).logits
    assert logits.dtype == torch.float32
    with pytest.raises(ConfigError, match=r"engine\.weights=q4 is not available here, only bf16, fp16, fp32"):
        CudaBackend.load(tiny_model("llama"), EngineConfig(weights="q4"), CPU)
