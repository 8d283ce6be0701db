"""The C interface of csrc/ through ctypes, which releases the GIL for the length of a call."""

import ctypes
import functools
import logging
from ctypes import POINTER, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from common.compiling import compiled
from common.errors import ConfigError
from common.logs import log

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra")


def library() -> Any | None:
    """Return the loaded library; None where no compiler made it, which is logged once. Blocks for a second at first."""
    return load()[0]


def refusal() -> str | None:
    """Return why there is no library; None where there is one. Blocks likewise."""
    return load()[1]


@functools.cache
def load() -> tuple[Any, str | None]:
    """Return both, of which one is None. Blocks for a second at first."""
    try:
        loaded = ctypes.CDLL(str(compiled(SOURCES, "library.cpp", "libkvtransfer.so", _FLAGS)))
    except ConfigError as error:
        return _refused(error.message)
    except OSError as error:
        return _refused(str(error))
    loaded.baton_copy_runs.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_void_p]
    loaded.baton_copy_runs.restype = c_int32
    loaded.baton_flow.argtypes = [
        c_int32, c_int32, c_void_p, c_int64, c_int32, c_int32, c_void_p, POINTER(c_int32),
    ]  # fmt: skip
    loaded.baton_flow.restype = c_int64
    return loaded, None


def _refused(reason: str) -> tuple[None, str]:
    log(logger, logging.WARNING, f"SLOW PATH: blocks are copied by memmove, and sockets fed, run by run: {reason}")
    return None, reason
