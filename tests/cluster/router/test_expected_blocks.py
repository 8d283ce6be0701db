"""Prompts under way are found by later ones as long as they are under way, and no longer."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.router.expected_blocks import ExpectedBlocks
from common.chain_hash import chain_hashes

CHAIN = chain_hashes(range(40), 1)


def sibling(common: int, own: int = 5, mark: int = 999) -> list[bytes]:
    return chain_hashes([*range(common), *(mark + i for i in range(own))], 1)


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 40))
def test_what_two_prompts_have_in_common_is_found_exactly(common: int, own: int, length: int) -> None:
    expected = ExpectedBlocks()
    expected.add("a", "w", CHAIN[:length], 0.0)

    found = expected.find(sibling(common, own), 0.0)

    assert found.get("w", 0) == min(common, length)


def test_each_worker_is_found_with_its_own() -> None:
    expected = ExpectedBlocks()
    expected.add("a", "w0", CHAIN, 0.0)
    expected.add("b", "w1", sibling(7), 0.0)

    assert expected.find(sibling(20), 0.0) == {"w0": 20, "w1": 7}
    assert expected.find(chain_hashes([5, 6], 1), 0.0) == {}
    assert expected.find([], 0.0) == {}


def test_they_outlive_the_first_token_until_the_worker_has_reported() -> None:
    expected = ExpectedBlocks()
    expected.add("a", "w", CHAIN, 0.0)
    expected.reported("w")
    expected.settle("a")
    expected.settle("a")
    expected.reported("another")

    assert expected.find(CHAIN, 11.0) == {"w": 40}
    expected.reported("w")
    assert expected.find(CHAIN, 11.0) == {}
    assert len(expected) == 0


def test_a_prompt_that_fails_is_forgotten_at_once() -> None:
    expected = ExpectedBlocks()
    expected.add("a", "w", CHAIN, 0.0)

    expected.drop("a")
    expected.drop("a")

    assert expected.find(CHAIN, 0.0) == {}
    assert len(expected) == 0


def test_a_lost_workers_prompts_are_forgotten_and_the_others_are_not() -> None:
    expected = ExpectedBlocks()
    expected.add("a", "w0", CHAIN, 0.0)
    expected.add("b", "w0", sibling(30), 0.0)
    expected.add("c", "w1", sibling(20), 0.0)
    expected.settle("b")

    expected.forget("w0")
    expected.settle("a")

    assert expected.find(CHAIN, 0.5) == {"w1": 20}


def test_a_prompt_that_never_ends_expires() -> None:
    expected = ExpectedBlocks()
    expected.add("a", "w", CHAIN, 0.0)

    assert expected.find(CHAIN, 299.0)
    assert expected.find(CHAIN, 301.0) == {}
    assert len(expected) == 0


def test_storms_leave_nothing_behind() -> None:
    expected = ExpectedBlocks()
    for number in range(300):
        expected.add(number, f"w{number % 3}", sibling(number % 40, mark=1000 * number), float(number))
        if number % 3:
            (expected.settle if number % 2 else expected.drop)(number)

    for number in range(3):
        expected.reported(f"w{number}")
    expected.find(CHAIN, 10_000.0)

    assert len(expected) == 0
