"""Every block is free, used or kept, whatever is done in whatever order; what is held is what the events say."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.chain_hash import chain_hashes
from common.errors import OverloadedError
from engine.block_pool import BlockPool
from engine.cache_log import PENDING_HASHES_MAX

BLOCK_TOKENS = 2
NUM_BLOCKS = 8


def _hashes(*tokens: int) -> list[bytes]:
    return chain_hashes(tokens, 1)


class _Users(RuleBasedStateMachine):
    """Sequences over a two-letter alphabet come, share prefixes, grow and go; a watcher follows the events."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.watched: set[bytes] = set()
        self.last_number = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def start(self, tokens: list[int]) -> None:
        hashes = chain_hashes(tokens, BLOCK_TOKENS)
        expected = self.pool.peek(hashes)
        assert self.pool.depth(hashes) >= expected
        table = self.pool.match(hashes)
        assert len(table) == expected
        try:
            table += self.pool.allocate(-(-len(tokens) // BLOCK_TOKENS) - len(table))
        except OverloadedError:
            self.pool.release(table)
            return
        for block_id, block_hash in zip(table, hashes, strict=False):
            self.pool.seal(block_id, block_hash)
        assert self.pool.peek(hashes) == len(hashes)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def watch(self) -> None:
        for change in self.pool.drain_events():
            assert change.number == self.last_number + 1
            self.last_number = change.number
            for block_hash in change.hashes:
                assert (block_hash in self.watched) != change.stored
            self.watched = self.watched | set(change.hashes) if change.stored else self.watched - set(change.hashes)
        number, held = self.pool.snapshot()
        assert number == self.last_number
        assert set(held) == self.watched

    @rule()
    def start_to_watch(self) -> None:
        before = self.pool.snapshot()
        assert self.pool.snapshot() == before

    @invariant()
    def is_consistent(self) -> None:
        self.pool.check()
        used = {block_id for table in self.tables for block_id in table}
        assert self.pool.num_used == len(used)
        assert self.pool.num_free + self.pool.num_used + self.pool.num_kept == NUM_BLOCKS


TestUsers = _Users.TestCase
TestUsers.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_too_large_an_allocation_takes_nothing_and_says_how_much_there_is() -> None:
    pool = BlockPool(4)
    pool.allocate(3)

    with pytest.raises(OverloadedError, match="need 2 blocks, 1 available"):
        pool.allocate(2)

    assert (pool.num_free, pool.num_used) == (1, 3)


def test_kept_blocks_are_found_again_and_shared_blocks_need_every_release() -> None:
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.seal(block, b"h")
    pool.release([block])

    first, second = pool.match([b"h"]), pool.match([b"h"])
    pool.release(first)

    assert first == second == [block]
    assert (pool.num_used, pool.num_kept) == (1, 0)
    pool.release(second)
    assert (pool.num_used, pool.num_kept) == (0, 1)


def test_the_deepest_block_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, recent = _hashes(1, 2), _hashes(3, 4)
    for hashes in (old, recent):
        table = pool.allocate(2)
        for block_id, block_hash in zip(table, hashes, strict=True):
            pool.seal(block_id, block_hash)
        pool.release(table)

    pool.allocate(1)

    assert (pool.peek(old), pool.peek(recent)) == (1, 2)
    pool.allocate(2)
    assert (pool.peek(old), pool.peek(recent)) == (0, 1)


def test_a_match_stops_at_the_first_hole() -> None:
    pool = BlockPool(4)
    hashes = _hashes(1, 2, 3)
    table = pool.allocate(3)
    pool.seal(table[0], hashes[0])
    pool.seal(table[2], hashes[2])

    assert pool.match(hashes) == table[:1]


def test_the_first_of_two_blocks_with_one_prefix_is_kept_and_the_other_freed() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.seal(first, b"h")
    pool.seal(second, b"h")

    pool.release([second, first])

    assert pool.match([b"h"]) == [first]
    assert pool.num_free == 3


def test_a_snapshot_separates_what_it_includes_from_what_follows() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.seal(first, b"a")
    number, held = pool.snapshot()

    pool.seal(second, b"b")

    later = [change for change in pool.drain_events() if change.number > number]
    assert held == [b"a"]
    assert [change.hashes for change in later] == [[b"b"]]


def test_changes_that_nobody_drains_are_dropped_with_a_gap_in_the_numbers() -> None:
    pool = BlockPool(1)
    for number in range(PENDING_HASHES_MAX):
        [block] = pool.allocate(1)
        pool.seal(block, number.to_bytes(4, "little"))
        pool.release([block])

    changes = pool.drain_events()

    assert sum(len(change.hashes) for change in changes) <= PENDING_HASHES_MAX
    assert changes[0].number > 1
    assert pool.snapshot()[0] == changes[-1].number
