"""raw: the bytes of the pool as they are."""

from common.errors import TransferError
from kvtransfer.codecs.base import Slabs


class RawCodec:
    """Implements `Codec`. Used where something else needs bytes in one piece, as a seal does."""

    name = "raw"
    is_lossless = True

    def encoded_max(self, slabs: Slabs) -> int:
        """Return the bytes themselves."""
        return slabs.num_bytes

    def encode(self, raw: memoryview, slabs: Slabs) -> memoryview:  # noqa: ARG002  # every shape is alike
        """Return `raw`."""
        return raw

    def decode(self, encoded: memoryview, slabs: Slabs, raw: memoryview) -> None:
        """Copy; see `Codec.decode`."""
        if encoded.nbytes != slabs.num_bytes:
            raise TransferError(f"{encoded.nbytes} bytes in place of {slabs.num_bytes}")
        raw[:] = encoded
