"""A pool of bytes with scales travels as it is, or losslessly: what is quantised already is not quantised again."""

import numpy as np
import pytest

from kvtransfer.codecs.base import Slabs
from kvtransfer.codecs.registry import AUTO, CODECS, codec_for, is_lossy
from kvtransfer.layout import BlockLayout

BYTES = BlockLayout("m", "int8", 16, 3, 2, 64)
HALVES = BYTES._replace(dtype="float16")


@pytest.mark.parametrize("name", [AUTO, *CODECS])
def test_a_codec_that_loses_something_is_replaced_where_values_have_scales(name: str) -> None:
    assert codec_for(HALVES, name) == name
    assert codec_for(BYTES, name) == ("raw" if is_lossy(name) else name)


@pytest.mark.parametrize("name", [name for name in CODECS if not is_lossy(name)])
def test_values_and_scales_come_back_byte_for_byte(name: str) -> None:
    codec, slabs = CODECS[name], Slabs.of(BYTES, num_blocks=5, num_layers=2)
    assert slabs.num_bytes == 5 * 2 * BYTES.layer_bytes
    raw = np.random.default_rng(3).integers(0, 40, slabs.num_bytes, dtype=np.uint8)
    decoded = np.empty_like(raw)

    encoded = codec.encode(raw.data, slabs)
    codec.decode(encoded, slabs, decoded.data)

    assert encoded.nbytes <= codec.encoded_max(slabs)
    assert (decoded == raw).all()
