"""Compile the kernels once for each machine: one shared library for each instruction set, kept in the user's cache.

A library is loaded only where the CPU has its instruction set, so the same checkout is safe on every x86-64 machine.
"""

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.logs import log

logger = logging.getLogger(__name__)

Isa = Literal["avx2", "avx512"]

SOURCES = Path(__file__).parent / "csrc"
CACHE = Path("~/.cache/baton/kernels")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_TIMEOUT_S = 300.0
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
    compiler, version = _compiler()
    flags = [*_FLAGS, *_ISA_FLAGS[isa]]
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256("\0".join([version, *flags]).encode())
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    target = CACHE.expanduser() / key.hexdigest()[:24] / f"libkernels-{isa}.so"
    if target.exists():
        return target
    log(logger, logging.INFO, "compiling kernels", isa=isa, compiler=compiler, target=str(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Compiled beside its place and moved there: a worker that starts at the same moment sees all of it or nothing.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            library = Path(folder) / target.name
            _compile([compiler, *flags, str(SOURCES / "step.cpp"), "-o", str(library)])
            library.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot compile kernels into {target.parent}: {error}") from error
    return target


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{command[0]} took more than {_COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise ConfigError(f"{command[0]} failed on the kernels: {complaints[0] if complaints else done.returncode}")


@functools.cache
def _compiler() -> tuple[str, str]:
    for name in _COMPILERS:
        if path := shutil.which(name):
            version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
            if version.returncode == 0:
                return path, version.stdout.partition("\n")[0]
    raise ConfigError(f"no C++ compiler found ({', '.join(_COMPILERS)}): install one to get the fast kernels")


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))
