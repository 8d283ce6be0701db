"""A prefix is hot when it was used often for each copy of late, and the deepest hot one counts."""

import pytest

from cluster.router.hits import Hits
from cluster.router.hot_prefixes import NOT_HOT, HotPrefixes
from cluster.router.prefix_index import PrefixIndex
from common.chain_hash import chain_hashes

CHAIN = chain_hashes(range(20), 1)


def hits(*held: int) -> Hits:
    """Return the hits of workers that hold so many leading blocks each."""
    index = PrefixIndex()
    for number, count in enumerate(held):
        index.replace(f"w{number}", CHAIN[:count])
    return index.find(CHAIN)


def test_what_is_used_seldom_is_not_hot() -> None:
    heat = HotPrefixes()

    assert [heat.use(CHAIN, hits(10), float(number)) for number in range(5)] == [NOT_HOT] * 5


def test_the_more_uses_for_each_copy_the_less_a_further_one_costs() -> None:
    heat = HotPrefixes()
    for _ in range(100):
        heat.use(CHAIN, hits(10), 0.0)

    assert heat.look(CHAIN, hits(10), 0.0).share == pytest.approx(0.95)
    assert heat.look(CHAIN, hits(10, 10), 0.0).share == pytest.approx(0.9)
    assert heat.look(CHAIN, hits(10, 10), 0.0).num_blocks == 10
    assert heat.look(CHAIN, hits(*[10] * 20), 0.0) == NOT_HOT


def test_heat_fades() -> None:
    heat = HotPrefixes()
    for _ in range(40):
        heat.use(CHAIN, hits(10), 0.0)

    assert heat.look(CHAIN, hits(10), 60.0).share == pytest.approx(0.75)
    assert heat.look(CHAIN, hits(10), 600.0) == NOT_HOT


def test_a_conversation_of_one_does_not_hide_the_prompt_of_all() -> None:
    heat = HotPrefixes()
    for _ in range(100):
        heat.use(CHAIN, hits(10), 0.0)

    assert heat.use(CHAIN, hits(10, 18), 0.0).num_blocks == 10


def test_only_so_many_prefixes_are_remembered() -> None:
    heat, index = HotPrefixes(), PrefixIndex()
    for number in range(5000):
        chain = chain_hashes([number], 1)
        index.replace("w", chain)
        heat.use(chain, index.find(chain), 0.0)

    assert len(heat) == 4096
