"""Sealing coded pieces: AES-256-GCM under a key that follows from the ticket's secret."""

import hashlib
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.errors import TransferError
from kvtransfer.pieces import Piece

TAG_BYTES = 16
_NONCE = struct.Struct("<Q4x")
_PLACE = struct.Struct("<QQHHQ")


class Seal:
    """The key of one ticket. Threads may share it.

    A ticket is used by one sender, which numbers its pieces: so no nonce is used twice under a key. What is sealed is
    bound to its place in the transfer; elsewhere it does not open.
    """

    def __init__(self, transfer_id: bytes, secret: bytes) -> None:
        key = hashlib.blake2b(transfer_id, digest_size=32, key=secret, person=b"baton-seal").digest()
        self._cipher = AESGCM(key)

    def close(self, data: memoryview, piece: Piece, nonce: int) -> memoryview:
        """Return `data` sealed, `TAG_BYTES` longer."""
        return memoryview(self._cipher.encrypt(_NONCE.pack(nonce), data, _place(piece, nonce)))

    def open(self, data: memoryview, piece: Piece, nonce: int) -> memoryview:
        """Return what was sealed.

        Raises:
            TransferError: damaged, foreign, or sealed for another place.
        """
        try:
            return memoryview(self._cipher.decrypt(_NONCE.pack(nonce), data, _place(piece, nonce)))
        except InvalidTag as error:
            raise TransferError("a piece whose seal is broken") from error


def _place(piece: Piece, nonce: int) -> bytes:
    return _PLACE.pack(nonce, piece.first, piece.layers.start, piece.layers.stop, len(piece.block_ids))
