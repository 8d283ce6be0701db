"""Blocks in files: one each, bounded in all, found again after a restart, verified when read."""

import contextlib
import shutil
import struct
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import xxhash

from common.errors import ConfigError

_HEADER = struct.Struct("<8sQQ")
"""Magic, length and checksum of what follows."""
_MAGIC = b"BATONKV1"
_PARTIAL = ".part"


class DiskTier:
    """Files of one worker. The index is the worker loop's; `write`, `read` and `remove` are for other threads.

    What was written for another model, format or block size lies under another key and is deleted at the start.
    """

    def __init__(self, folder: Path, key: str, bytes_max: int) -> None:
        """Open the folder and index what is there, oldest first.

        Args:
            folder: this worker's own.
            key: names everything that the bytes depend on.
            bytes_max: of all files together.

        Raises:
            ConfigError: it cannot be read or written.
        """
        self.bytes_max = bytes_max
        self._folder = folder / key
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._num_bytes = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for other in folder.iterdir():
                if other != self._folder:
                    shutil.rmtree(other)
            self._scan()
        except OSError as error:
            raise ConfigError(f"engine.disk_tier_dir: cannot use {folder}: {error}") from error

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._sizes

    def hashes(self) -> list[bytes]:
        """Return the blocks that are here."""
        return list(self._sizes)

    def touch(self, block_hash: bytes) -> None:
        """Note a use."""
        self._sizes.move_to_end(block_hash)

    def add(self, block_hash: bytes, num_bytes: int) -> None:
        """Index a block that was written."""
        self._num_bytes += num_bytes - self._sizes.pop(block_hash, 0)
        self._sizes[block_hash] = num_bytes

    def forget(self, block_hash: bytes) -> None:
        """Index a block no more; `remove` its file then."""
        self._num_bytes -= self._sizes.pop(block_hash, 0)

    def surplus(self) -> list[bytes]:
        """Forget the least recently used blocks beyond `bytes_max`, and return them."""
        surplus = []
        while self._num_bytes > self.bytes_max:
            block_hash, num_bytes = self._sizes.popitem(last=False)
            self._num_bytes -= num_bytes
            surplus.append(block_hash)
        return surplus

    def write(self, block_hash: bytes, data: bytes) -> int:
        """Write a file and return its size; 0 if the disk does not take it. A file is there whole or not at all."""
        path = self._path(block_hash)
        partial = path.with_suffix(_PARTIAL)
        try:
            partial.write_bytes(_HEADER.pack(_MAGIC, len(data), xxhash.xxh3_64_intdigest(data)) + data)
            partial.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return 0
        return _HEADER.size + len(data)

    def read(self, block_hash: bytes) -> bytes | None:
        """Return what was written; None if it is gone or is not what it was."""
        try:
            data = self._path(block_hash).read_bytes()
            magic, length, checksum = _HEADER.unpack_from(data)
        except (OSError, struct.error):
            return None
        payload = data[_HEADER.size :]
        is_whole = magic == _MAGIC and length == len(payload) and checksum == xxhash.xxh3_64_intdigest(payload)
        return payload if is_whole else None

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Delete files, if they are there."""
        for block_hash in hashes:
            with contextlib.suppress(OSError):
                self._path(block_hash).unlink(missing_ok=True)

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / block_hash.hex()

    def _scan(self) -> None:
        found = []
        for path in self._folder.iterdir():
            if path.suffix == _PARTIAL:
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(ValueError):  # not ours: left alone
                found.append((path.stat().st_mtime_ns, bytes.fromhex(path.name), path.stat().st_size))
        for _, block_hash, num_bytes in sorted(found):
            self.add(block_hash, num_bytes)
        self.remove(self.surplus())
