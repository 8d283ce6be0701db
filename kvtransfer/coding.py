"""Pieces as one message: out of the sender's pool into it, and out of it into the receiver's blocks.

So travels what is coded or sealed, and what comes from or goes to a pool in a device, which no wire can touch.

    pool ── gather ── encode ── (seal) ── checksum ──► message ──► check ── (open) ── decode ── scatter ──► pool

Both directions block, and run on an endpoint's copy threads.
"""

import time
from typing import NamedTuple

import xxhash

from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.codecs.base import Codec, Slabs
from kvtransfer.codecs.registry import RAW
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import PoolMemory
from kvtransfer.pieces import Piece, Runs
from kvtransfer.seal import TAG_BYTES, Seal


class BadMessageError(TransferError):
    """A message that is not what its sender announced."""


class Coding(NamedTuple):
    """How the pieces of one transfer travel."""

    codec: Codec
    seal: Seal | None
    checksum: bool

    def encoded_max(self, slabs: Slabs) -> int:
        """Return the most bytes of a message with such slabs."""
        return self.codec.encoded_max(slabs) + (TAG_BYTES if self.seal else 0)


class Coded(NamedTuple):
    """A piece as it travels."""

    data: memoryview
    checksum: int
    seconds: float = 0.0
    """That coding took."""


class Parcel(NamedTuple):
    """One piece, for whoever codes it."""

    piece: Piece
    runs: Runs
    nonce: int


def slabs_of(piece: Piece, layout: BlockLayout) -> Slabs:
    """Return what a piece is made of."""
    return Slabs.of(layout, len(piece.block_ids), len(piece.layers))


def code(coding: Coding, memory: PoolMemory, layout: BlockLayout, parcel: Parcel, stop: Stop) -> Coded:
    """Make a message of a piece of `memory`. Blocks; the pool is not read any more afterwards.

    Raises:
        TransferError: stopped, or the codec cannot carry the values.
    """
    gathered = memory.staging(parcel.runs.num_bytes)
    memory.gather(parcel.runs, gathered, stop)
    started = time.monotonic()
    data = coding.codec.encode(gathered, slabs_of(parcel.piece, layout))
    seconds = time.monotonic() - started
    if coding.seal is not None:
        data = coding.seal.close(data, parcel.piece, parcel.nonce)
    return Coded(data, xxhash.xxh3_64_intdigest(data) if coding.checksum else 0, seconds)


def place(coding: Coding, coded: Coded, memory: PoolMemory, layout: BlockLayout, parcel: Parcel, stop: Stop) -> None:
    """Bring a message's blocks into `memory`. Blocks.

    Raises:
        BadMessageError: damaged, or not what was announced; nothing was written.
        TransferError: stopped.
    """
    data = coded.data
    if coding.checksum and xxhash.xxh3_64_intdigest(data) != coded.checksum:
        raise BadMessageError("a message with a wrong checksum")
    try:
        if coding.seal is not None:
            data = coding.seal.open(data, parcel.piece, parcel.nonce)
        if coding.codec.name == RAW and data.nbytes == parcel.runs.num_bytes:
            values = data  # as it is: no second copy
        else:
            values = memory.staging(parcel.runs.num_bytes)
            coding.codec.decode(data, slabs_of(parcel.piece, layout), values)
    except TransferError as error:
        raise BadMessageError(error.message) from error
    memory.scatter(values, parcel.runs, stop)
