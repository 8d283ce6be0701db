"""Which caller a key belongs to. The file is looked at again when a call comes, so that a change needs no restart."""

import asyncio
import hmac
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from cluster.tenants import key_file
from cluster.tenants.callers import ANONYMOUS, Caller, caller_of
from common.clock import Clock
from common.errors import ConfigError, UnauthenticatedError
from common.logs import log

_LOG = logging.getLogger(__name__)
LOOK_S = 1.0
"""The file is looked at so often at most: a removed key works so long at most."""
_NO_KEY = bytes(32)


class _Known(NamedTuple):
    digest: bytes
    caller: Caller


class _State(NamedTuple):
    """What tells one state of the file from another: a replaced file has another inode."""

    inode: int
    mtime_ns: int
    num_bytes: int


class Keys(Protocol):
    """Whoever can tell callers apart."""

    async def find(self, key: str | None) -> Caller:
        """Return whose key this is.

        Raises:
            UnauthenticatedError: nobody's.
        """
        ...

    async def again(self, caller: Caller) -> Caller:
        """Return who a caller of a while ago is now.

        Raises:
            UnauthenticatedError: the key is not known any more.
        """
        ...


class NoKeys:
    """Where no keys are configured, everybody may do everything."""

    async def find(self, key: str | None) -> Caller:  # noqa: ARG002 - a key that nobody asked for does no harm
        """Return the one caller that there is."""
        return ANONYMOUS

    async def again(self, caller: Caller) -> Caller:
        """Return the same."""
        return caller


class KeyStore:
    """Keys of a file. Owned by the gateway's loop; the file is read on a thread, by one call at a time.

    A file that went bad or away changes nothing: the keys that were last read stay, and the log says so once.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        """Create with `load`."""
        self._path = path
        self._clock = clock
        self._known: Mapping[str, _Known] = {}
        self._state: _State | None = None
        self._looked_s = clock.now()

    @classmethod
    async def load(cls, path: Path, clock: Clock) -> "KeyStore":
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or is wrong.
        """
        store = cls(path, clock)
        store._state = _state(path)
        store._known = await asyncio.to_thread(_read, path)
        return store

    async def find(self, key: str | None) -> Caller:
        """Return whose key this is.

        Raises:
            UnauthenticatedError: nobody's.
        """
        await self._look()
        if not key:
            raise UnauthenticatedError("an API key is needed: send `authorization: Bearer KEY`")
        known = self._known.get(key_file.key_id(key) or "")
        expected = _NO_KEY if known is None else known.digest
        if not hmac.compare_digest(key_file.digest(key), expected) or known is None:
            raise UnauthenticatedError("the API key is not known here")
        return known.caller

    async def again(self, caller: Caller) -> Caller:
        """Return who a caller of a while ago is now.

        Raises:
            UnauthenticatedError: the key was removed.
        """
        await self._look()
        known = self._known.get(caller.key_id)
        if known is None:
            raise UnauthenticatedError("the API key is not known here any more")
        return known.caller

    async def _look(self) -> None:
        if self._clock.now() - self._looked_s < LOOK_S:
            return
        self._looked_s = self._clock.now()  # calls that come meanwhile go by the old keys
        state = _state(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._known = await asyncio.to_thread(_read, self._path)
        except ConfigError as error:
            log(_LOG, logging.ERROR, f"the keys stay as they were: {error.message}")
            return
        log(_LOG, logging.INFO, "keys read again", keys=len(self._known))


def _state(path: Path) -> _State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _State(found.st_ino, found.st_mtime_ns, found.st_size)


def _read(path: Path) -> Mapping[str, _Known]:
    file = key_file.read(path)
    return {
        entry.id: _Known(bytes.fromhex(entry.sha256), caller_of(entry, file.tenants[entry.tenant]))
        for entry in file.keys
    }
