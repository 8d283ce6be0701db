"""int8: 255 levels between a group's largest value and its negative."""

import numpy as np
from numpy.typing import NDArray

from kvtransfer.codecs.elements import Floats
from kvtransfer.codecs.quantising import QuantisingCodec


class Int8Codec(QuantisingCodec):
    """Implements `Codec`."""

    name = "int8"
    largest = 127.0
    kernel_kind = 0

    def _to_bytes(self, values: Floats) -> NDArray[np.uint8]:
        return np.rint(values).astype(np.int8).view(np.uint8)

    def _to_values(self, codes: NDArray[np.uint8]) -> Floats:
        return codes.view(np.int8).astype(np.float32)
