"""What is decoded is what was encoded, or as near as the codec says; a peer's bytes are never trusted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import TransferError
from kvtransfer.codecs.base import Slabs
from kvtransfer.codecs.elements import from_float32, to_float32
from kvtransfer.codecs.quantising import QuantisingCodec, library
from kvtransfer.codecs.registry import CODECS, is_allowed, is_lossy
from kvtransfer.layout import BlockLayout

DTYPES = ("float32", "float16", "bfloat16")
LOSSY = [name for name, codec in CODECS.items() if not codec.is_lossless]
STEP = {"int8": 0.5 / 127, "fp8": 2.0**-4}
"""Largest error of a value: of its group's largest for int8, of itself for fp8 (and a subnormal step)."""

shapes = st.builds(
    Slabs,
    num_slabs=st.integers(1, 5),
    tokens=st.integers(1, 17),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 4, 8, 12, 16, 64]),
    dtype=st.sampled_from(DTYPES),
)


def raw_of(values: np.ndarray, dtype: str) -> memoryview:
    raw = memoryview(bytearray(values.size * (4 if dtype == "float32" else 2)))
    from_float32(values.astype(np.float32).reshape(-1), dtype, raw)
    return raw


def normal_values(slabs: Slabs, seed: int = 0) -> memoryview:
    rng = np.random.default_rng(seed)
    return raw_of(rng.normal(size=slabs.num_values) * rng.choice([1e-3, 1, 30], size=slabs.num_values), slabs.dtype)


def there_and_back(name: str, raw: memoryview, slabs: Slabs) -> memoryview:
    encoded = CODECS[name].encode(raw, slabs)
    assert encoded.nbytes <= CODECS[name].encoded_max(slabs)
    back = memoryview(bytearray(slabs.num_bytes))
    CODECS[name].decode(encoded, slabs, back)
    return back


@pytest.mark.parametrize("name", ["raw", "lossless"])
@settings(max_examples=40, deadline=None)
@given(slabs=shapes, data=st.data())
def test_lossless_codecs_give_back_every_byte(name: str, slabs: Slabs, data: st.DataObject) -> None:
    some = data.draw(st.binary(min_size=1, max_size=64))
    raw = memoryview((some * (slabs.num_bytes // len(some) + 1))[: slabs.num_bytes])

    assert bytes(there_and_back(name, raw, slabs)) == bytes(raw)


def test_lossless_shrinks_what_computed_values_look_like() -> None:
    slabs = Slabs(60, 16, 3, 64, "bfloat16")

    assert CODECS["lossless"].encode(normal_values(slabs), slabs).nbytes < 0.85 * slabs.num_bytes


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=60, deadline=None)
@given(slabs=shapes, data=st.data())
def test_quantised_values_are_near_and_kernel_and_numpy_agree(name: str, slabs: Slabs, data: st.DataObject) -> None:
    codec = CODECS[name]
    assert isinstance(codec, QuantisingCodec)
    elements = st.floats(-1000, 1000, width=32)
    raw = raw_of(data.draw(hnp.arrays(np.float32, slabs.num_values, elements=elements)), slabs.dtype)
    values = to_float32(raw, slabs.dtype)

    back = to_float32(there_and_back(name, raw, slabs), slabs.dtype)

    group = 8 if slabs.dim % 8 == 0 else slabs.dim
    grouped = values.reshape(slabs.num_slabs, slabs.tokens, -1, group)
    largest = np.broadcast_to(np.abs(grouped).max(axis=(1, 3), keepdims=True), grouped.shape).reshape(-1)
    bound = STEP[name] * (largest if name == "int8" else np.abs(values) + largest * 2.0**-9) + largest * 0.005 + 1e-30
    assert (np.abs(back - values) <= bound).all()
    by_numpy = np.empty(codec.encoded_max(slabs), dtype=np.uint8)
    assert codec.encode_by_numpy(raw, slabs, by_numpy)
    assert bytes(codec.encode(raw, slabs)) == by_numpy.tobytes()
    back_by_numpy = memoryview(bytearray(slabs.num_bytes))
    codec.decode_by_numpy(by_numpy.data, slabs, back_by_numpy)
    assert bytes(back_by_numpy) == bytes(there_and_back(name, raw, slabs))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_blocks_have_a_byte_a_value_and_three_percent_of_scales(name: str, dtype: str) -> None:
    slabs = Slabs(60, 16, 3, 64, dtype)

    assert CODECS[name].encoded_max(slabs) == slabs.num_values * (1 + 4 / 128)


@pytest.mark.parametrize("name", CODECS)
def test_blocks_of_a_byte_a_value_come_back_exactly_with_their_scales(name: str) -> None:
    layout = BlockLayout("m", "int8", block_tokens=4, num_layers=3, num_kv_heads=2, head_dim=8)
    slabs = Slabs.of(layout, 2, 3)
    raw = memoryview(np.random.default_rng(1).bytes(2 * layout.block_bytes))

    assert slabs.num_bytes == raw.nbytes
    assert bytes(there_and_back(name, raw, slabs)) == bytes(raw)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name: str, dtype: str, value: float) -> None:
    slabs = Slabs(2, 4, 2, 16, dtype)
    raw = memoryview(bytearray(slabs.num_bytes))
    values = to_float32(normal_values(slabs), dtype).copy()
    values[77] = value
    with np.errstate(over="ignore"):
        if dtype == "float16":
            raw = memoryview(bytearray(values.astype(np.float16).tobytes()))
        else:
            from_float32(values, dtype, raw)
    codec = CODECS[name]
    assert isinstance(codec, QuantisingCodec)

    with pytest.raises(TransferError, match="not finite"):
        codec.encode(raw, slabs)
    assert not codec.encode_by_numpy(raw, slabs, np.empty(codec.encoded_max(slabs), dtype=np.uint8))


@pytest.mark.parametrize("name", LOSSY)
def test_extreme_values_stay_in_their_type(name: str) -> None:
    slabs = Slabs(1, 4, 1, 8, "float16")
    values = np.full(slabs.num_values, 65504, dtype=np.float32)
    values[1::2] = -65504
    values[8:] = 1e-7

    back = to_float32(there_and_back(name, raw_of(values, "float16"), slabs), "float16")

    assert np.isfinite(back).all()
    assert back[0] == -back[1]
    assert back[0] > 65000


def test_fp8_has_every_number_of_e4m3() -> None:
    codec = CODECS["fp8"]
    slabs = Slabs(1, 1, 16, 8, "float32")
    positive = [(m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]
    values = np.array([448.0 if i % 8 == 7 else v for i, v in enumerate([*positive, 448.0])], dtype=np.float32)

    back = to_float32(there_and_back("fp8", raw_of(-values, "float32"), slabs), "float32")

    assert codec.name == "fp8"
    np.testing.assert_allclose(back, -values, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "raw"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_no_encoder_made_is_an_error_or_finite_values(name: str, data: st.DataObject) -> None:
    slabs = Slabs(3, 4, 2, 8, "bfloat16")
    encoded = bytearray(CODECS[name].encode(normal_values(slabs), slabs))
    kind = data.draw(st.sampled_from(["cut", "long", "flip", "noise"]))
    match kind:
        case "cut":
            del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
        case "long":
            encoded += data.draw(st.binary(min_size=1, max_size=9))
        case "flip":
            encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
        case "noise":
            encoded = bytearray(data.draw(st.binary(max_size=CODECS[name].encoded_max(slabs) + 4)))
    back = memoryview(bytearray(slabs.num_bytes))
    try:
        CODECS[name].decode(memoryview(encoded), slabs, back)
    except TransferError:
        return
    assert kind in ("flip", "noise")
    if name in LOSSY:
        assert np.isfinite(to_float32(back, "bfloat16")).all()


def test_a_bomb_is_not_expanded() -> None:
    import struct

    import zstandard

    slabs = Slabs(1, 1, 1, 8, "float16")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    small = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8))

    for frame in (bomb, small):
        encoded = struct.pack("<I", 7) + frame[:7] + struct.pack("<I", 8) + bytes(8)
        with pytest.raises(TransferError):
            CODECS["lossless"].decode(memoryview(encoded), slabs, memoryview(bytearray(16)))


def test_a_ticket_allows_its_codec_and_what_loses_nothing() -> None:
    assert [used for used in CODECS if is_allowed("auto", used)] == ["raw", "lossless"]
    assert [used for used in CODECS if is_allowed("int8", used)] == ["raw", "int8"]
    assert not is_allowed("auto", "unheard of")
    assert [name for name in ("auto", *CODECS) if is_lossy(name)] == ["int8", "fp8"]


def test_the_kernel_is_used_where_it_can_be() -> None:
    """On machines with AVX2 and a compiler, as CI's, the fast path must not have gone missing."""
    from pathlib import Path

    flags = Path("/proc/cpuinfo").read_text()
    assert (library() is not None) or " avx2 " not in flags or " f16c " not in flags
