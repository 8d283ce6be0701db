"""Coded pieces: out of the sender's pool into one message, and out of the message into the receiver's blocks.

    pool ── gather ── encode ── (seal) ── checksum ──► message ──► check ── (open) ── decode ── scatter ──► pool

Both directions block, and run on an endpoint's copy threads.
"""

import time
from typing import NamedTuple

import numpy as np
import xxhash

from common.errors import TransferError
from kvtransfer.activity import Stop
from kvtransfer.codecs.base import Codec, Slabs
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import Memory, copy_runs
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


def code(coding: Coding, memory: Memory, layout: BlockLayout, parcel: Parcel, stop: Stop) -> Coded:
    """Make a message of a piece of `memory`. Blocks; the pool is not read any more afterwards.

    Raises:
        TransferError: stopped, or the codec cannot carry the values.
    """
    gathered = _buffer(parcel.runs.num_bytes)
    copy_runs(memory, Memory(gathered), parcel.runs.with_targets(parcel.runs.packed()), stop)
    started = time.monotonic()
    data = coding.codec.encode(gathered, slabs_of(parcel.piece, layout))
    seconds = time.monotonic() - started
    if coding.seal is not None:
        data = coding.seal.close(data, parcel.piece, parcel.nonce)
    return Coded(data, xxhash.xxh3_64_intdigest(data) if coding.checksum else 0, seconds)


def place(coding: Coding, coded: Coded, memory: Memory, layout: BlockLayout, parcel: Parcel, stop: Stop) -> None:
    """Bring a message's blocks into `memory`. Blocks.

    Raises:
        BadMessageError: damaged, or not what was announced; nothing was written.
        TransferError: stopped.
    """
    data = coded.data
    if coding.checksum and xxhash.xxh3_64_intdigest(data) != coded.checksum:
        raise BadMessageError("a message with a wrong checksum")
    values = _buffer(parcel.runs.num_bytes)
    try:
        if coding.seal is not None:
            data = coding.seal.open(data, parcel.piece, parcel.nonce)
        coding.codec.decode(data, slabs_of(parcel.piece, layout), values)
    except TransferError as error:
        raise BadMessageError(error.message) from error
    copy_runs(Memory(values), memory, parcel.runs.with_sources(parcel.runs.packed()), stop)


def new_message(num_bytes: int) -> memoryview:
    """Return room for a message."""
    return _buffer(num_bytes)


def _buffer(num_bytes: int) -> memoryview:
    """Return memory that nobody has cleared: it will be overwritten."""
    return np.empty(num_bytes, dtype=np.uint8).data
