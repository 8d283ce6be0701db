"""Compile the kernels once for each machine: one shared library for each instruction set, kept in the user's cache.

A library is loaded only where the CPU has its instruction set, so the same checkout is safe on every x86-64 machine.

Not by torch.utils.cpp_extension: the kernels see pointers and structs, no tensor, so that they need neither Python's
headers nor torch's, nor ninja, and one library serves every torch. A file that only includes torch/extension.h takes
35 s of CPU to compile, our kernels for AVX-512 13 (a busy core, GCC). ctypes lets go of the GIL for a step; pybind11
would have to be told.
"""

import functools
import platform
from pathlib import Path
from typing import Literal

from common.compiling import compiled

Isa = Literal["avx2", "avx512"]

SOURCES = Path(__file__).parent / "csrc"
# Contraction is off so that a sum rounds alike in every tile height. GCC's own AVX-512 headers trip -Wuninitialized.
_FLAGS = [
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
    *("-fPIC", "-shared", "-pthread", "-Wall", "-Wextra"),
    *("-Wno-psabi", "-Wno-ignored-attributes", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
_ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        *("-mavx2", "-mfma", "-mf16c"),
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    ],
}
_CPU_FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
}


def supported_isas() -> list[Isa]:
    """Return the instruction sets that this machine has and the kernels know, fastest first; empty: none."""
    if platform.machine() != "x86_64":
        return []
    flags = _cpu_flags()
    levels: tuple[Isa, ...] = ("avx512", "avx2")
    return [isa for isa in levels if _CPU_FLAGS[isa] <= flags]


def build_library(isa: Isa) -> Path:
    """Return the compiled library of an instruction set, compiling it (some ten seconds) if it is not in the cache.

    Raises:
        ConfigError: no C++ compiler, or it failed; the message has its first complaint.
    """
    return compiled(SOURCES, "step.cpp", f"libkernels-{isa}.so", [*_FLAGS, *_ISA_FLAGS[isa]])


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
