"""Chain hashes of prompts that were never spelled out: from the parts that cover each block."""

import hashlib
import struct
from collections.abc import Sequence

from common.chain_hash import HASH_BYTES, root_hash
from loadtest.content import Segment

_PIECE = struct.Struct("<QQQ")


def block_names(parts: Sequence[Segment], block_tokens: int, count: int) -> list[bytes]:
    """Return the names of the first `count` blocks of `parts`.

    Two prompts agree in name i exactly if the same pieces of content cover their blocks 0 to i: that is if their
    tokens are the same there, since different contents differ (content.header_tokens).

    Args:
        parts: the prompt, at least `count * block_tokens` tokens.
        block_tokens: tokens in a block.
        count: of full blocks.
    """
    names: list[bytes] = []
    parent, pieces, room = root_hash(block_tokens), b"", block_tokens
    for part in parts:
        offset = 0
        while offset < part.num_tokens:
            taken = min(room, part.num_tokens - offset)
            pieces += _PIECE.pack(part.content_id, offset, taken)
            offset += taken
            room -= taken
            if room == 0:
                if len(names) == count:
                    return names
                parent = hashlib.blake2b(parent + pieces, digest_size=HASH_BYTES).digest()
                names.append(parent)
                pieces, room = b"", block_tokens
    assert len(names) >= count
    return names[:count]
