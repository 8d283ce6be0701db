"""The tensor and the bytes of a pool are one memory in the layout that the handshake names, and it is given back."""

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from engine.free_memory import free_memory_bytes
from engine.kv_cache import WINDOWS_MAX, KVCache, blocks_of_free_memory, blocks_within
from kvtransfer.layout import BlockLayout


def _layout(
    dtype: str = "float32", block_tokens: int = 4, num_layers: int = 2, heads: int = 3, head_dim: int = 5
) -> BlockLayout:
    return BlockLayout("m", dtype, block_tokens, num_layers, heads, head_dim)


def _descriptors() -> set[str]:
    """Return the names of this process's open files."""
    return {str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir()}


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    num_blocks=st.integers(1, 6),
    data=st.data(),
)
def test_an_element_lies_where_the_axes_say(
    dtype: str, sizes: tuple[int, int, int, int], num_blocks: int, data: st.DataObject
) -> None:
    layout = _layout(dtype, *sizes)
    block_tokens, num_layers, heads, head_dim = sizes
    axes = (num_blocks, num_layers, 2, block_tokens, heads, head_dim)
    index = tuple(data.draw(st.integers(0, size - 1)) for size in axes)
    kv = KVCache(layout, num_blocks)

    kv.tensor()[index] = 1.5

    width = layout.layer_bytes // (2 * block_tokens * heads * head_dim)
    start = int(np.ravel_multi_index(index, axes)) * width
    expected = torch.tensor([1.5], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    assert bytes(kv.buffer[start : start + width]) == expected
    assert kv.buffer[:start].nbytes + width + kv.buffer[start + width :].nbytes == num_blocks * layout.block_bytes
    assert not any(kv.buffer[:start])
    assert not any(kv.buffer[start + width :])
    kv.close()


def test_a_process_that_maps_the_memfd_sees_what_is_written() -> None:
    kv = KVCache(_layout(), 3)
    assert kv.memfd is not None
    mapped = mmap.mmap(kv.memfd, 3 * kv.layout.block_bytes, prot=mmap.PROT_READ)

    kv.tensor()[1] = 7.0

    block = mapped[kv.layout.block_bytes : 2 * kv.layout.block_bytes]
    assert np.frombuffer(block, np.float32).tolist() == [7.0] * (kv.layout.block_bytes // 4)
    mapped.close()
    kv.close()


def test_close_leaves_no_descriptor_and_no_mapping() -> None:
    before = _descriptors()
    kv = KVCache(_layout(), 3)
    kv.tensor()[0] = 1.0

    kv.close()
    kv.close()

    assert _descriptors() == before
    assert "baton-kv" not in Path("/proc/self/maps").read_text()
    assert kv.memfd is None


def test_a_view_that_outlives_close_stays_readable_and_then_frees_the_memory() -> None:
    kv = KVCache(_layout(), 3)
    view = kv.tensor()
    view[2] = 4.0

    kv.close()

    assert float(view[2].sum()) == 4.0 * view[2].numel()
    del view, kv
    gc.collect()
    assert "baton-kv" not in Path("/proc/self/maps").read_text()


def test_a_pool_beyond_the_address_space_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="cannot map a KV pool of"):
        KVCache(_layout(), 1 << 50)


def test_a_pool_that_holds_no_block_is_refused_with_both_sizes() -> None:
    layout = _layout(block_tokens=512, num_layers=64, heads=8, head_dim=128)

    with pytest.raises(ConfigError, match=f"pool_mib=1 holds no block: one has {layout.block_bytes} bytes"):
        blocks_within(layout, 1)

    assert blocks_within(layout, 1024) == 1024 * 1024 * 1024 // layout.block_bytes


def test_a_pool_without_a_size_takes_its_share_of_what_is_free_but_no_more_than_it_can_use() -> None:
    layout = _layout(block_tokens=16, num_layers=64, heads=8, head_dim=128)

    num_blocks = blocks_of_free_memory(layout, 0.1, 1 << 40, free_memory_bytes())

    assert num_blocks * layout.block_bytes <= 0.1 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert num_blocks > 0
    assert blocks_of_free_memory(_layout(block_tokens=16), 1.0, 100, free_memory_bytes()) == WINDOWS_MAX * 7
    with pytest.raises(ConfigError, match=r"pool_share=1e-12 holds no block"):
        blocks_of_free_memory(layout, 1e-12, 1 << 40, free_memory_bytes())
