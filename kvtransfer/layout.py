"""Shape, dtype and bytes of a block, and whether two pools may exchange blocks."""

from typing import NamedTuple

from baton_pb.v1 import transfer_pb2
from common.errors import MismatchError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
SCALED_DTYPES = {"int8": 2}
"""Bytes of the scale that each token and kv head has beside its values: fp16, after the values of a layer's K or V."""
AXES = "layer,kv,token,head,dim"


class BlockLayout(NamedTuple):
    """One block: `[layers][K, V][block_tokens][kv heads][head dim]`, contiguous; layers are sub-ranges of it.

    With a scaled dtype each K and V is followed by its scales, `[block_tokens][kv heads]`.
    """

    model_id: str
    dtype: str
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    axes: str = AXES

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one token and kv head; 0: the dtype has none."""
        return SCALED_DTYPES.get(self.dtype, 0)

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in a block."""
        row_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + self.scale_bytes
        return 2 * self.block_tokens * self.num_kv_heads * row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.num_layers * self.layer_bytes

    def to_pb(self) -> transfer_pb2.BlockLayout:
        """Encode for a handshake."""
        return transfer_pb2.BlockLayout(**self._asdict())

    @classmethod
    def from_pb(cls, layout: transfer_pb2.BlockLayout) -> "BlockLayout":
        """Decode; the values are not believed until `require_equal`."""
        return cls(**{name: getattr(layout, name) for name in cls._fields})


def require_equal(ours: BlockLayout, theirs: BlockLayout) -> None:
    """Refuse a peer with another layout.

    Raises:
        MismatchError: naming each field that differs, and both values.
    """
    different = [
        f"{name} is {mine!r} here and {other!r} there"
        for name, mine, other in zip(ours._fields, ours, theirs, strict=True)
        if mine != other
    ]
    if different:
        raise MismatchError(f"block layouts differ: {'; '.join(different)}")
