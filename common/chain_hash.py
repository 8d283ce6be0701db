"""Names of prefixes: h[i] = H(h[i-1], tokens of block i). The same in router, gateway and every worker.

BLAKE2b with 16 bytes: a collision would answer a request with foreign KV, so 64 bits would not do.
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
_VERSION = b"baton-chain-1"


def root_hash(block_tokens: int, salt: bytes = b"") -> bytes:
    """Return the hash before the first block.

    Args:
        block_tokens: tokens in a block; pools with other blocks share no names.
        salt: a tenant's secret when caches are isolated, at most 64 bytes. It enters here and nowhere else.
    """
    return hashlib.blake2b(_VERSION + block_tokens.to_bytes(4, "little"), digest_size=HASH_BYTES, key=salt).digest()


def salted(salt: bytes, more: str) -> bytes:
    """Return a salt that who knows both can make; `salt` itself if `more` is empty."""
    return hashlib.blake2b(more.encode(), digest_size=32, key=salt).digest() if more else salt


def extend_chain(parent: bytes, block: Sequence[int]) -> bytes:
    """Return the hash of the prefix that ends with `block` and continues `parent`."""
    tokens = array("I", block)
    assert tokens.itemsize == 4
    if sys.byteorder != "little":
        tokens.byteswap()
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=HASH_BYTES).digest()


def chain_hashes(token_ids: Sequence[int], block_tokens: int, salt: bytes = b"") -> list[bytes]:
    """Return one hash for each full block of `token_ids`, in order."""
    parent = root_hash(block_tokens, salt)
    hashes = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = extend_chain(parent, token_ids[start : start + block_tokens])
        hashes.append(parent)
    return hashes


def probe(block_tokens: int) -> bytes:
    """Return the hash of a fixed prompt: equal in two processes if and only if they name prefixes alike."""
    return chain_hashes(range(2 * block_tokens), block_tokens)[-1]
