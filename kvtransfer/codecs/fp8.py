"""fp8: OCP's e4m3, a sign, four bits of exponent (bias 7) and three of mantissa; 448 is the largest, no infinities."""

import numpy as np
from numpy.typing import NDArray

from kvtransfer.codecs.elements import Floats
from kvtransfer.codecs.quantising import QuantisingCodec

_SMALLEST_NORMAL = 2.0**-6
_STEPS_BELOW = 2.0**9
"""Below the smallest normal number, values are multiples of 2**-9."""
_BIAS_DIFFERENCE = 127 - 7
_NAN = 0x7F


class Fp8Codec(QuantisingCodec):
    """Implements `Codec`."""

    name = "fp8"
    largest = 448.0
    kernel_kind = 1

    def _to_bytes(self, values: Floats) -> NDArray[np.uint8]:
        bits = values.view(np.uint32)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # three bits of mantissa, ties to even
        normal = rounded - (_BIAS_DIFFERENCE << 3)
        below = np.rint(np.minimum(np.abs(values), _SMALLEST_NORMAL) * np.float32(_STEPS_BELOW)).astype(np.uint32)
        codes: NDArray[np.uint32] = np.where(np.abs(values) < _SMALLEST_NORMAL, below, normal) | ((bits >> 31) << 7)
        return codes.astype(np.uint8)

    def _to_values(self, codes: NDArray[np.uint8]) -> Floats:
        # e4m3's bits in float32's places are the value divided by 2**(difference of the biases), subnormals included.
        # The pattern of NaN is one that nobody encodes; it counts as the number that would follow 448.
        magnitude = ((codes & 0x7F).astype(np.uint32) << 20).view(np.float32) * np.float32(2.0**_BIAS_DIFFERENCE)
        return np.where(codes & 0x80, -magnitude, magnitude)
