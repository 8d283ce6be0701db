"""Equal prefixes have equal names in every process; whatever differs has another name."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from common.chain_hash import HASH_BYTES, chain_hashes, extend_chain, probe, root_hash

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(1, 8))
def test_there_is_one_hash_for_each_full_block(token_ids: list[int], block_tokens: int) -> None:
    hashes = chain_hashes(token_ids, block_tokens)

    assert len(hashes) == len(token_ids) // block_tokens
    assert all(len(prefix) == HASH_BYTES for prefix in hashes)


@given(tokens, tokens, st.integers(1, 8))
def test_a_common_beginning_has_common_hashes_and_nothing_else_has(
    first: list[int], second: list[int], block_tokens: int
) -> None:
    one, other = chain_hashes(first, block_tokens), chain_hashes(second, block_tokens)

    for number, (left, right) in enumerate(zip(one, other, strict=False), start=1):
        assert (left == right) == (first[: number * block_tokens] == second[: number * block_tokens])


@given(tokens, st.integers(1, 8), st.binary(max_size=64))
def test_extending_block_by_block_gives_the_same_chain(token_ids: list[int], block_tokens: int, salt: bytes) -> None:
    parent, chain = root_hash(block_tokens, salt), []
    for start in range(0, len(token_ids) // block_tokens * block_tokens, block_tokens):
        parent = extend_chain(parent, token_ids[start : start + block_tokens])
        chain.append(parent)

    assert chain == chain_hashes(token_ids, block_tokens, salt)


def test_salts_and_block_sizes_share_no_names() -> None:
    token_ids = list(range(64))

    chains = [chain_hashes(token_ids, 16), chain_hashes(token_ids, 16, b"a"), chain_hashes(token_ids, 16, b"b")]
    chains += [chain_hashes(token_ids, 32)]

    names = [name for chain in chains for name in chain]
    assert len(set(names)) == len(names)


def test_another_process_computes_the_same_probe() -> None:
    code = "from common.chain_hash import probe; print(probe(16).hex())"

    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert other.stdout.strip() == probe(16).hex()
