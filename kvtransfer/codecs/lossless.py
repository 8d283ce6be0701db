"""lossless: byte planes under zstd. Signs and exponents of neighbouring values are alike, their mantissas are noise.

encoded = for each byte of a value, low to high: u32 length, then that plane's bytes, as they are or as a zstd frame
"""

import struct

import numpy as np
import zstandard

from common.errors import TransferError
from kvtransfer.codecs.base import Slabs
from kvtransfer.layout import DTYPE_BYTES

_LEVEL = 1
_HEADER = struct.Struct("<I")


class LosslessCodec:
    """Implements `Codec`."""

    name = "lossless"
    is_lossless = True

    def encoded_max(self, slabs: Slabs) -> int:
        """Return the bytes themselves and a length for each plane: what does not shrink is left as it is."""
        return slabs.num_bytes + _HEADER.size * DTYPE_BYTES[slabs.dtype]

    def encode(self, raw: memoryview, slabs: Slabs) -> memoryview:
        """Compress plane by plane; see `Codec.encode`."""
        planes = np.frombuffer(raw, dtype=np.uint8).reshape(slabs.num_values, -1).T
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        encoded = bytearray()
        for plane in planes:
            plain = np.ascontiguousarray(plane).data
            small = compressor.compress(plain)
            best = small if len(small) < plain.nbytes else plain
            encoded += _HEADER.pack(len(best))
            encoded += best
        return memoryview(encoded)

    def decode(self, encoded: memoryview, slabs: Slabs, raw: memoryview) -> None:
        """Expand plane by plane; see `Codec.decode`."""
        planes = np.frombuffer(raw, dtype=np.uint8).reshape(slabs.num_values, -1).T
        at = 0
        for number in range(len(planes)):
            if encoded.nbytes < at + _HEADER.size:
                raise TransferError("a compressed piece that ends too early")
            (size,) = _HEADER.unpack_from(encoded, at)
            at += _HEADER.size
            if not 0 < size <= min(slabs.num_values, encoded.nbytes - at):
                raise TransferError(f"a plane of {size} bytes in a compressed piece")
            planes[number] = _plane(encoded[at : at + size], slabs.num_values)
            at += size
        if at != encoded.nbytes:
            raise TransferError(f"{encoded.nbytes - at} bytes behind a compressed piece")


def _plane(data: memoryview, num_values: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if data.nbytes == num_values:
        return np.frombuffer(data, dtype=np.uint8)
    try:
        if zstandard.frame_content_size(data) != num_values:  # before anything is allocated for it
            raise TransferError("a compressed plane of another length")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_values)
    except zstandard.ZstdError as error:
        raise TransferError(f"a compressed plane that cannot be expanded: {error}") from error
    return np.frombuffer(plain, dtype=np.uint8)
