"""The index knows what a brute-force model knows, under any events, gaps, losses and snapshots."""

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.router.holder_table import Tier
from cluster.router.prefix_index import PrefixIndex, Snapshot
from common.chain_hash import HASH_BYTES, chain_hashes
from tests.cluster.router.sizes import reachable_bytes

BLOCK = 2
WORKERS = ["w0", "w1", "w2"]
workers = st.sampled_from(WORKERS)
prompts = st.lists(st.integers(0, 2), max_size=12)
AT_ONCE, POOL = 100, 20_000
"""Blocks of an event, and that a worker holds."""


class IndexMachine(RuleBasedStateMachine):
    """Tiers that hold chains closed under their beginnings, and a channel that may lose their events."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.true: dict[str, dict[Tier, set[bytes]]] = {worker: {tier: set() for tier in Tier} for worker in WORKERS}
        self.known = {worker: {tier: set[bytes]() for tier in Tier} for worker in WORKERS}
        self.numbers = dict.fromkeys(WORKERS, 0)
        self.follows: dict[str, bool] = dict.fromkeys(WORKERS, False)
        self.chains: list[list[bytes]] = [[]]
        self.lost: set[str] = set()
        self.started: set[str] = set()

    def send(self, worker: str, stored: bool, hashes: Sequence[bytes], tier: Tier, is_lost: bool) -> None:
        self.numbers[worker] += 1
        if is_lost and worker in self.started:
            if self.follows[worker]:
                self.lost.add(worker)
            return
        expected = self.follows[worker] and worker not in self.lost
        assert self.index.apply(worker, self.numbers[worker], stored, hashes, tier) == expected
        if expected:
            self.started.add(worker)
            self.known[worker] = {at: set(held) for at, held in self.true[worker].items()}
        else:
            self.follows[worker] = False

    def deepest(self, worker: str, data: st.DataObject, tier: Tier) -> list[bytes]:
        """Return some blocks of a tier, with whatever continues them: what is evicted goes the deepest first."""
        chain = data.draw(st.sampled_from(self.chains))
        return sorted(self.true[worker][tier] & self.after(chain[data.draw(st.integers(0, len(chain))) :]))

    def after(self, blocks: Iterable[bytes]) -> set[bytes]:
        """Return these blocks and all that continue them."""
        first = set(blocks)
        return {other for known in self.chains for i, other in enumerate(known) if first & set(known[: i + 1])}

    @rule(worker=workers, prompt=prompts, is_lost=st.booleans())
    def store(self, worker: str, prompt: list[int], is_lost: bool) -> None:
        chain = chain_hashes(prompt, BLOCK)
        self.chains.append(chain)
        self.true[worker][Tier.POOL].update(chain)
        self.send(worker, True, chain, Tier.POOL, is_lost)

    @rule(worker=workers, data=st.data(), is_lost=st.booleans())
    def evict_from_everywhere(self, worker: str, data: st.DataObject, is_lost: bool) -> None:
        for tier in (Tier.POOL, Tier.HOST, Tier.DISK):
            gone = self.deepest(worker, data, tier)
            elsewhere = {block for at, held in self.true[worker].items() if at != tier for block in held}
            if elsewhere & self.after(gone):
                continue  # it would leave a deeper block without its beginning
            self.true[worker][tier] -= set(gone)
            self.send(worker, False, gone, tier, is_lost)

    @rule(worker=workers, data=st.data(), below=st.sampled_from([Tier.HOST, Tier.DISK]), is_lost=st.booleans())
    def demote(self, worker: str, data: st.DataObject, below: Tier, is_lost: bool) -> None:
        moved = self.deepest(worker, data, Tier.POOL)
        self.true[worker][below].update(moved)
        self.send(worker, True, moved, below, is_lost)
        self.true[worker][Tier.POOL] -= set(moved)
        self.send(worker, False, moved, Tier.POOL, is_lost)

    @rule(worker=workers)
    def snapshot(self, worker: str) -> None:
        tiers = self.true[worker]
        self.index.replace(worker, Snapshot(tiers[Tier.POOL], tiers[Tier.HOST], tiers[Tier.DISK]))
        self.known[worker] = {tier: set(held) for tier, held in tiers.items()}
        self.follows[worker] = True
        self.lost.discard(worker)
        self.started.discard(worker)

    @rule(worker=workers)
    def lose(self, worker: str) -> None:
        self.index.forget(worker)
        self.known[worker], self.follows[worker] = {tier: set() for tier in Tier}, False

    @rule(worker=workers)
    def restart_with_empty_tiers(self, worker: str) -> None:
        self.lose(worker)
        self.true[worker] = {tier: set() for tier in Tier}
        self.numbers[worker] = 0
        self.snapshot(worker)

    @rule(data=st.data(), more=prompts)
    def match(self, data: st.DataObject, more: list[int]) -> None:
        known = data.draw(st.sampled_from(self.chains))
        chain = known[: data.draw(st.integers(0, len(known)))] + chain_hashes(more, BLOCK)

        hits = self.index.find(chain)

        for worker in WORKERS:
            tiers = self.known[worker]
            pool, memory = tiers[Tier.POOL], tiers[Tier.POOL] | tiers[Tier.HOST]
            assert hits.of(worker) == longest(chain, memory | tiers[Tier.DISK])
            assert hits.pool_of(worker) <= hits.memory_of(worker) <= hits.of(worker)
            if self.is_closed(pool):
                assert hits.pool_of(worker) == longest(chain, pool)
            if self.is_closed(memory):
                assert hits.memory_of(worker) == longest(chain, memory)

    def is_closed(self, blocks: set[bytes]) -> bool:
        return all(longest(chain, blocks) == sum(block in blocks for block in chain) for chain in self.chains)

    @invariant()
    def counts_are_right(self) -> None:
        counts = {worker: sum(map(len, self.known[worker].values())) for worker in WORKERS}
        assert self.index.num_blocks == sum(counts.values())
        for worker in WORKERS:
            assert self.index.num_blocks_of(worker) == counts[worker]
            assert self.index.needs_snapshot(worker) != self.follows[worker]


def longest(chain: Sequence[bytes], blocks: set[bytes]) -> int:
    return next((i for i, block in enumerate(chain) if block not in blocks), len(chain))


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


def test_events_before_a_snapshot_are_refused() -> None:
    index = PrefixIndex()

    assert not index.apply("w", 1, True, [b"a"])
    assert index.needs_snapshot("w")
    assert index.match("w", [b"a"]) == 0


def test_a_gap_keeps_what_is_known_and_refuses_the_rest_until_a_snapshot() -> None:
    index = PrefixIndex()
    index.replace("w", [b"a"])

    assert index.apply("w", 7, True, [b"b"])
    assert not index.apply("w", 9, False, [b"a"])
    assert not index.apply("w", 10, False, [b"a"])
    assert index.match("w", [b"a", b"b"]) == 2

    index.replace("w", [b"c"])
    assert index.apply("w", 30, True, [b"d"])
    assert index.match("w", [b"c", b"d"]) == 2


def test_every_length_of_a_held_prefix_is_found() -> None:
    chain = chain_hashes(range(6), 1)

    for held in range(7):
        index = PrefixIndex()
        index.replace("w", chain[:held])
        assert [index.match("w", chain[:asked]) for asked in range(7)] == [min(held, asked) for asked in range(7)]


def test_a_match_looks_at_few_hashes_of_a_long_chain() -> None:
    looked = 0

    class Counting(bytes):
        def __hash__(self) -> int:
            nonlocal looked
            looked += 1
            return super().__hash__()

    index = PrefixIndex()
    chain = chain_hashes(range(8192), 1)
    index.replace("w", chain[:5000])

    assert index.match("w", [Counting(prefix) for prefix in chain]) == 5000
    assert looked <= 16


def test_prompts_that_came_and_went_leave_nothing_behind() -> None:
    index = PrefixIndex()
    index.replace("w", [])

    for number in range(2000):
        chain = chain_hashes(range(number, number + 4), BLOCK)
        assert index.apply("w", 2 * number + 1, True, chain)
        assert index.apply("w", 2 * number + 2, False, chain)

    assert index.num_blocks == 0


def test_memory_is_flat_while_a_million_distinct_prompts_come_and_go() -> None:
    """FIELD_PROBLEMS 46: nodes that are split and never merged. All prompts begin with one block and then part."""
    index = PrefixIndex()
    common = b"what all begin with".ljust(HASH_BYTES)
    index.replace("w", [common])
    numbers = itertools.count(1)
    held: deque[list[bytes]] = deque()

    def come_and_go(begin: int, end: int) -> int:
        for first in range(begin, end, AT_ONCE):
            held.append([number.to_bytes(HASH_BYTES, "little") for number in range(first, first + AT_ONCE)])
            assert index.match("w", [common, held[-1][0]]) == 1
            assert index.apply("w", next(numbers), True, held[-1])
            assert index.match("w", [common, held[-1][0]]) == 2
            if len(held) > POOL // AT_ONCE:  # the worker's pool is full
                assert index.apply("w", next(numbers), False, held.popleft())
        return reachable_bytes(index)

    early = come_and_go(0, 100_000)
    assert come_and_go(100_000, 1_000_000) < early + 500_000  # one byte kept of each prompt would be more
    assert index.num_blocks == 1 + POOL


def test_workers_that_come_and_go_leave_nothing_behind_and_inherit_nothing() -> None:
    index = PrefixIndex()
    chain = chain_hashes(range(12), 1)

    for number in range(50):
        index.replace(f"w{number}", Snapshot(chain[:4], chain[4:8], chain[8:]))
        index.replace(f"v{number}", chain[:2])
        index.forget(f"w{number}")
        assert index.match(f"v{number}", chain) == 2
        assert index.match(f"w{number}", chain) == 0
        index.forget(f"v{number}")

    assert index.num_blocks == 0
    assert index.find(chain).levels == []


def test_the_holders_of_a_prompt_come_in_levels() -> None:
    index = PrefixIndex()
    chain = chain_hashes(range(10), 1)
    for worker, count in (("a", 3), ("b", 10), ("c", 3), ("d", 0)):
        index.replace(worker, chain[:count])

    hits = index.find(chain)

    assert [level.num_blocks for level in hits.levels] == [3, 10]
    assert hits.levels[0].holders == hits.bits["a"] | hits.bits["c"]


def test_evicting_what_a_worker_does_not_hold_changes_nothing() -> None:
    index = PrefixIndex()
    chain = chain_hashes(range(4), 1)
    index.replace("a", chain)
    index.replace("b", [])

    assert index.apply("b", 1, False, chain)

    assert (index.match("a", chain), index.match("b", chain)) == (4, 0)
    assert (index.num_blocks_of("a"), index.num_blocks_of("b")) == (4, 0)
