"""The index knows what a brute-force model knows, under any events, gaps, losses and snapshots."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.router.prefix_index import PrefixIndex
from common.chain_hash import chain_hashes

BLOCK = 2
WORKERS = ["w0", "w1", "w2"]
workers = st.sampled_from(WORKERS)
prompts = st.lists(st.integers(0, 2), max_size=12)


class IndexMachine(RuleBasedStateMachine):
    """Pools that hold chains closed under their beginnings, and a channel that may lose their events."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.pools: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}
        self.numbers = dict.fromkeys(WORKERS, 0)
        self.follows: dict[str, bool] = dict.fromkeys(WORKERS, False)
        self.known: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}
        self.chains: list[list[bytes]] = [[]]
        self.lost: set[str] = set()
        self.started: set[str] = set()

    def send(self, worker: str, stored: bool, hashes: Sequence[bytes], is_lost: bool) -> None:
        self.numbers[worker] += 1
        if is_lost:
            if self.follows[worker]:
                self.lost.add(worker)
            return
        has_gap = worker in self.lost
        expected = self.follows[worker] and not has_gap
        assert self.index.apply(worker, self.numbers[worker], stored, hashes) == expected
        if expected:
            self.started.add(worker)
            self.known[worker] = set(self.pools[worker])
        else:
            self.follows[worker] = False

    @rule(worker=workers, prompt=prompts, is_lost=st.booleans())
    def store(self, worker: str, prompt: list[int], is_lost: bool) -> None:
        chain = chain_hashes(prompt, BLOCK)
        self.chains.append(chain)
        self.pools[worker].update(chain)
        self.send(worker, True, chain, is_lost and worker in self.started)

    @rule(worker=workers, data=st.data(), is_lost=st.booleans())
    def evict(self, worker: str, data: st.DataObject, is_lost: bool) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        keep = data.draw(st.integers(0, len(chain)))
        # Whatever continues an evicted block goes too: pools evict the deepest first.
        gone = {
            other for known in self.chains for i, other in enumerate(known) if set(chain[keep:]) & set(known[: i + 1])
        }
        evicted = sorted(self.pools[worker] & gone)
        self.pools[worker] -= gone
        self.send(worker, False, evicted, is_lost and worker in self.started)

    @rule(worker=workers)
    def snapshot(self, worker: str) -> None:
        self.index.replace(worker, self.pools[worker])
        self.known[worker] = set(self.pools[worker])
        self.follows[worker] = True
        self.lost.discard(worker)
        self.started.discard(worker)

    @rule(worker=workers)
    def lose(self, worker: str) -> None:
        self.index.forget(worker)
        self.known[worker], self.follows[worker] = set(), False

    @rule(worker=workers, data=st.data(), more=prompts)
    def match(self, worker: str, data: st.DataObject, more: list[int]) -> None:
        known = data.draw(st.sampled_from(self.chains))
        chain = known[: data.draw(st.integers(0, len(known)))] + chain_hashes(more, BLOCK)
        longest = 0
        while longest < len(chain) and chain[longest] in self.known[worker]:
            longest += 1

        assert self.index.match(worker, chain) == longest

    @invariant()
    def counts_are_right(self) -> None:
        assert self.index.num_blocks == sum(len(known) for known in self.known.values())
        for worker in WORKERS:
            assert self.index.num_blocks_of(worker) == len(self.known[worker])
            assert self.index.needs_snapshot(worker) != self.follows[worker]


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
