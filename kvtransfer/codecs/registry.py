"""Which codecs there are."""

from kvtransfer.codecs.base import Codec
from kvtransfer.codecs.fp8 import Fp8Codec
from kvtransfer.codecs.int8 import Int8Codec
from kvtransfer.codecs.lossless import LosslessCodec
from kvtransfer.codecs.quantising import QuantisingCodec, library
from kvtransfer.codecs.raw import RawCodec
from kvtransfer.layout import BlockLayout

RAW = "raw"
AUTO = "auto"
"""In a ticket: the sender chooses among the lossless ones."""
CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(), LosslessCodec(), Int8Codec(), Fp8Codec())}


def prepare(name: str) -> None:
    """Compile and load what a codec needs, which blocks for seconds the first time on a machine: no transfer's time."""
    if isinstance(CODECS.get(name), QuantisingCodec):
        library()


def codec_for(layout: BlockLayout, asked: str) -> str:
    """Return the codec for blocks of this layout: bytes with scales are quantised already, so those go as they are."""
    return RAW if layout.scale_bytes and is_lossy(asked) else asked


def is_lossy(name: str) -> bool:
    """Whether a ticket with this codec may bring other values than were computed."""
    return name != AUTO and not CODECS[name].is_lossless


def is_allowed(asked: str, used: str) -> bool:
    """Whether a sender may use one codec for a ticket that asks for another; raw is never worse."""
    return used in CODECS and (used in (asked, RAW) or (asked == AUTO and CODECS[used].is_lossless))
