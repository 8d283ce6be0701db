"""A sequence's hashes always equal the chain hashes of its tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain_hash import chain_hashes
from common.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=20)


@given(prompt=TOKENS, output=TOKENS, block_tokens=st.integers(1, 6), salt=st.binary(max_size=8))
def test_appending_keeps_the_hashes_up(prompt: list[int], output: list[int], block_tokens: int, salt: bytes) -> None:
    sequence = Sequence.start("r", prompt, len(prompt), SamplingParams(), block_tokens, salt)

    for token_id in output:
        sequence.append(token_id, block_tokens)

    assert sequence.hashes == chain_hashes(prompt + output, block_tokens, salt)
    assert sequence.num_output_tokens == len(output)


@pytest.mark.parametrize(("num_tokens", "num_reusable"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_block_of_the_last_token_is_never_reused(num_tokens: int, num_reusable: int) -> None:
    sequence = Sequence.start("r", list(range(num_tokens)), num_tokens, SamplingParams(), 4)

    assert len(sequence.reusable_hashes(4)) == num_reusable


def test_a_sequence_keeps_its_own_copy_of_the_prompt() -> None:
    prompt = [1, 2]
    sequence = Sequence.start("r", prompt, 2, SamplingParams(), 4)

    sequence.append(3, 4)

    assert prompt == [1, 2]


@pytest.mark.parametrize(("tokens", "num_prompt_tokens"), [([], 0), ([1], 0), ([1], 2)])
def test_a_prompt_must_have_tokens(tokens: list[int], num_prompt_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match="need at least 1"):
        Sequence.start("r", tokens, num_prompt_tokens, SamplingParams(), 4)


def test_a_salt_that_no_hash_can_take_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 64 bytes, got 65"):
        Sequence.start("r", [1], 1, SamplingParams(), 4, b"x" * 65)
