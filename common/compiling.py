"""Compile C++ once for each machine: a shared library in the user's cache, named by compiler, flags and sources."""

import functools
import hashlib
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.logs import log

logger = logging.getLogger(__name__)

CACHE = Path("~/.cache/baton/kernels")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_TIMEOUT_S = 300.0


def compiled(folder: Path, main: str, library: str, flags: Sequence[str]) -> Path:
    """Return the shared library of `main`, compiling it if it is not in the cache.

    Args:
        folder: every file in it is part of the library's name in the cache.
        main: the file that is compiled; it includes the others.
        library: file name of the result.
        flags: for the compiler, without output and input.

    Raises:
        ConfigError: no C++ compiler, or it failed; the message has its first complaint.
    """
    compiler, version = _compiler()
    key = hashlib.sha256("\0".join([version, *flags]).encode())
    for source in sorted(folder.iterdir()):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    target = CACHE.expanduser() / key.hexdigest()[:24] / library
    if target.exists():
        return target
    log(logger, logging.INFO, "compiling kernels", library=library, compiler=compiler, target=str(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Compiled beside its place and moved there: a worker that starts at the same moment sees all of it or nothing.
        with tempfile.TemporaryDirectory(dir=target.parent) as building:
            result = Path(building) / target.name
            _compile([compiler, *flags, str(folder / main), "-o", str(result)])
            result.replace(target)
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
