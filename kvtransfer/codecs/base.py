"""What a codec is: a way to put the values of some blocks into fewer bytes, for as long as they are on a wire."""

from typing import NamedTuple, Protocol

from kvtransfer.layout import DTYPE_BYTES, BlockLayout


class Slabs(NamedTuple):
    """Values to be coded: `[num_slabs][tokens][heads][dim]`, contiguous; a slab is K or V of one layer of one block."""

    num_slabs: int
    tokens: int
    heads: int
    dim: int
    dtype: str

    @classmethod
    def of(cls, layout: BlockLayout, num_blocks: int, num_layers: int) -> "Slabs":
        """Return what so many layers of so many blocks are made of; a pool's own scales count as further values."""
        num_slabs = 2 * num_blocks * num_layers
        row = layout.head_dim + layout.scale_bytes // DTYPE_BYTES[layout.dtype]
        return cls(num_slabs, layout.block_tokens, layout.num_kv_heads, row, layout.dtype)

    @property
    def num_values(self) -> int:
        """Numbers in all slabs."""
        return self.num_slabs * self.tokens * self.heads * self.dim

    @property
    def num_bytes(self) -> int:
        """Their bytes in the pool."""
        return self.num_values * DTYPE_BYTES[self.dtype]


class Codec(Protocol):
    """One way of coding. Stateless; threads may share it. Calls block and let go of the GIL for most of their time."""

    @property
    def name(self) -> str:
        """As in tickets and in the config."""
        ...

    @property
    def is_lossless(self) -> bool:
        """Whether what is decoded equals what was encoded, byte for byte."""
        ...

    def encoded_max(self, slabs: Slabs) -> int:
        """Return the most bytes that `encode` makes of such slabs."""
        ...

    def encode(self, raw: memoryview, slabs: Slabs) -> memoryview:
        """Return `raw` encoded; it may be `raw` itself.

        Raises:
            TransferError: these values cannot be coded, e.g. because they are not finite.
        """
        ...

    def decode(self, encoded: memoryview, slabs: Slabs, raw: memoryview) -> None:
        """Undo `encode` into `raw`, of `slabs.num_bytes` bytes. What is encoded came from a peer.

        Raises:
            TransferError: nothing that `encode` can have made.
        """
        ...
