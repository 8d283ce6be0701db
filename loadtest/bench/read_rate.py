"""How fast this machine reads a file's pages from memory: a decode step reads all weights and takes at least that."""

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.compiling import compiled

_FLAGS = ["-std=c++20", "-O3", "-mavx2", "-fvisibility=hidden", "-fPIC", "-shared"]
_PASSES = 5


def read_seconds(file: Path, threads: int) -> float:
    """Return how long it takes to read a file that lies in the page cache; the best of some passes.

    Args:
        file: mapped, like weights are.
        threads: that share the work.

    Raises:
        ConfigError: there is no C++ compiler.
        OSError: there is no such file.
    """
    library = ctypes.CDLL(str(compiled(Path(__file__).parent / "csrc", "read.cpp", "libread.so", _FLAGS)))
    library.read_words.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.read_words.restype = ctypes.c_uint64
    with file.open("rb") as stream, ThreadPoolExecutor(threads) as pool:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        words = np.frombuffer(mapped, np.uint64, mapped.size() // 8)
        parts = [(part.ctypes.data, len(part)) for part in np.array_split(words, threads)]
        best = float("inf")
        for _ in range(_PASSES + 1):  # the first one maps the pages
            begun = time.perf_counter()
            list(pool.map(lambda part: library.read_words(*part), parts))
            best = min(best, time.perf_counter() - begun)
    return best
