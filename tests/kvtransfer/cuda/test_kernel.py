"""The kernel's source, run on the CPU, copies what numpy copies and touches nothing else; NVRTC accepts it."""

import ctypes
import functools
from ctypes import c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.compiling import compiled
from kvtransfer.cuda.kernel import NAME, OPTIONS, SOURCE, THREADS, Launch
from kvtransfer.fake_device import FakeDevice
from kvtransfer.layout import BlockLayout
from kvtransfer.pieces import Piece, Run, Runs, runs_of

MARK = 0xEE


@functools.cache
def cpu_kernel() -> Any:
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"]
    library = ctypes.CDLL(str(compiled(SOURCE.parent, "on_cpu.cpp", "libpaged_copy_on_cpu.so", flags)))
    library.baton_launch_on_cpu.argtypes = [c_uint32, c_uint32, c_uint32, c_void_p, c_void_p, c_void_p, c_int32]
    library.baton_launch_on_cpu.restype = None
    return library


def aligned(num_bytes: int, shift: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return marked memory whose address leaves the remainder `shift` when divided by 16."""
    whole = np.full(num_bytes + 32, MARK, np.uint8)
    begin = -whole.ctypes.data % 16 + shift
    return whole[begin : begin + num_bytes]


def copy_on_cpu(source: Any, target: Any, runs: Runs, launch: Launch, threads: int) -> None:
    cpu_kernel().baton_launch_on_cpu(
        *launch, threads, source.ctypes.data, target.ctypes.data, runs.table.ctypes.data, len(runs)
    )


@st.composite
def copies(draw: st.DrawFn) -> tuple[Runs, int, int]:
    """Draw runs whose targets do not overlap, in units of 1, 4 or 16 bytes, and the bytes of both sides."""
    unit = draw(st.sampled_from([1, 4, 16]))
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    source_units = max(lengths) + draw(st.integers(0, 50))
    table, at = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        at += gap
        table.append(Run(draw(st.integers(0, source_units - length)) * unit, at * unit, length * unit))
        at += length
    order = draw(st.permutations(table))
    return Runs.of(order), source_units * unit, (at + 2) * unit


@settings(max_examples=150, deadline=None)
@given(copies(), st.tuples(*[st.integers(0, 3)] * 2), st.builds(Launch, *[st.integers(1, 5)] * 2), st.integers(1, 9))
def test_any_runs_are_copied_by_any_grid(
    work: tuple[Runs, int, int], shifts: tuple[int, int], grid: Launch, threads: int
) -> None:
    runs, source_bytes, target_bytes = work
    source, target = aligned(source_bytes, 4 * shifts[0]), aligned(target_bytes, 4 * shifts[1])
    source[:] = np.random.default_rng(source_bytes).integers(0, 256, source_bytes, np.uint8)
    expected = target.copy()
    for run in runs:
        expected[run.target : run.target + run.num_bytes] = source[run.source : run.source + run.num_bytes]

    copy_on_cpu(source, target, runs, grid, threads)

    assert np.array_equal(target, expected)


@pytest.mark.parametrize("layers", [range(30), range(1), range(7, 15)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_pieces_of_a_pool_are_gathered_and_scattered_as_the_fake_device_does(dtype: str, layers: range) -> None:
    layout = BlockLayout("m", dtype, block_tokens=16, num_layers=30, num_kv_heads=3, head_dim=64)
    pool, landing = aligned(8 * layout.block_bytes, 0), aligned(8 * layout.block_bytes, 0)
    pool[:] = np.random.default_rng(3).integers(0, 256, pool.nbytes, np.uint8)
    runs = runs_of(Piece(1, (6, 7, 2, 2), layers), (0, 5, 6, 1, 3), layout)
    packed = aligned(runs.num_bytes, 0)
    fake = FakeDevice(pool)
    fake.gather(runs.with_targets(runs.packed()), buffer := fake.buffer(runs.num_bytes))
    expected = landing.copy()
    FakeDevice(expected).scatter(buffer, runs.with_sources(runs.packed()))

    copy_on_cpu(pool, packed, out := runs.with_targets(runs.packed()), Launch.of(out), THREADS)
    copy_on_cpu(packed, landing, back := runs.with_sources(runs.packed()), Launch.of(back), THREADS)

    assert np.array_equal(packed, buffer.bytes)
    assert np.array_equal(landing, expected)


def test_a_launch_stays_within_cudas_limits() -> None:
    assert Launch.of(Runs.of([Run(0, 0, 1)] * 70_000)) == Launch(1, 65_535)
    assert Launch.of(Runs.of([Run(0, 0, 1 << 40)])) == Launch(64, 1)


@pytest.mark.parametrize("architecture", ["compute_75", "sm_80", "sm_90"])
def test_nvrtc_compiles_the_source_without_a_gpu(architecture: str) -> None:
    module = pytest.importorskip("nvidia.cuda_nvrtc", reason="needs nvidia-cuda-nvrtc-cu12, which extra `gpu` brings")
    (path,) = (Path(folder) / "lib/libnvrtc.so.12" for folder in module.__path__)
    nvrtc, program = ctypes.CDLL(str(path)), c_void_p()
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"k.cu", 0, None, None) == 0

    outcome = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))

    size = ctypes.c_size_t()
    assert outcome == 0
    assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    ptx = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetPTX(program, ptx) == 0
    assert f".entry {NAME}(".encode() in ptx.value
    assert b"v4.u32" in ptx.value  # 16 bytes at once
