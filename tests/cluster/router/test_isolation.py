"""What the router does for one tenant's prompt is the same whether or not another tenant has sent that very prompt.

Tenants' prompts are named by chain hashes with different salts. Not only where a request goes must be the same: what it
is predicted to take must be too, for that decides about refusals, and a client can ask for it.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.holder_table import Tier
from cluster.router.placement import PlacementRequest, Reservation
from cluster.router.policies.registry import POLICIES
from cluster.router.router import Router
from cluster.router.step_model import StepModel
from cluster.router.worker import Role, WorkerFacts, WorkerInfo, WorkerLoad
from common.chain_hash import chain_hashes
from common.clock import ManualClock

BLOCK = 16
MODEL = StepModel(base_s=0.005, token_s=1e-3, pair_s=1e-8, sequence_s=1e-3, context_s=1e-7)
NAMES = ("p0", "p1", "d0", "d1", "b0", "b1")
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
BLOCKS = 40
SECRET = list(range(BLOCKS * BLOCK + 1))
OTHER = [token + 10_000 for token in SECRET]

# What happens on behalf of tenant A before B asks: its prompt is placed, prefilled, cached by a worker, evicted.
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("end"), st.booleans()),
    st.tuples(st.just("wait"), st.floats(0.001, 30.0)),
    st.tuples(st.just("keep"), st.sampled_from(NAMES), st.integers(1, BLOCKS), st.sampled_from(list(Tier))),
    st.tuples(st.just("evict"), st.sampled_from(NAMES), st.integers(1, BLOCKS), st.sampled_from(list(Tier))),
)


class World:
    """A router, and a tenant A that asks what we let it ask."""

    def __init__(self, policy: str, prompt: list[int], salt: bytes) -> None:
        self.clock = ManualClock()
        self.router = Router(POLICIES[policy](), Random(7), self.clock)
        self.router.set_workers([WorkerInfo(name, "here", ROLES[name[0]]) for name in NAMES])
        for name in NAMES:
            self.router.welcome(name, WorkerFacts(1, "m", "l", BLOCK, b"", 4096, 1 << 16))
            self.router.index.replace(name, [])
            self.router.report(name, WorkerLoad(free_blocks=4096))
            row = self.router.workers.get(name)
            assert row is not None
            row.candidate.model = MODEL
        self._hashes = chain_hashes(prompt, BLOCK, salt)
        self._running: list[Reservation] = []
        self._numbers = dict.fromkeys(NAMES, 0)

    def act(self, action: tuple[Any, ...]) -> None:
        match action:
            case "ask", has_answer:
                request = PlacementRequest("a", len(SECRET), 50, self._hashes, tenant="a")
                self._running.append(self.router.place(request))
                if has_answer:
                    self._running[-1].first_token()
            case "end", _ if self._running:
                self._running.pop(0).release(0.01)
            case "wait", seconds:
                self.clock.advance(seconds)
            case "keep" | "evict" as what, name, count, tier:
                self._numbers[name] += 1
                # A worker holds leading blocks; it evicts from the end.
                hashes = self._hashes[:count] if what == "keep" else self._hashes[count:]
                assert self.router.index.apply(name, self._numbers[name], what == "keep", hashes, tier)

    def ask(self, salt: bytes) -> list[object]:
        """Let B ask twice; return all that is decided and predicted."""
        request = PlacementRequest("b", len(SECRET), 50, chain_hashes(SECRET, BLOCK, salt), tenant="b")
        seen: list[object] = []
        for _ in range(2):
            foreseen = self.router.predict(request)
            reservation = self.router.place(request)
            seen += [reservation.placement, reservation.size, foreseen.terms(), foreseen.first, foreseen.then]
        for explanation in self.router.explanations.of("b"):
            seen += [(pair.terms(), pair.first, pair.then) for pair in explanation.considered]
        return seen


def seen_by_b(policy: str, history: list[tuple[Any, ...]], prompt: list[int], salt: bytes = b"a") -> list[object]:
    world = World(policy, prompt, salt)
    for action in history:
        world.act(action)
    return world.ask(b"b")


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=50, deadline=None)
@given(history=st.lists(ACTIONS, max_size=12))
def test_whatever_a_tenant_asked_and_left_behind_another_sees_no_trace_of_its_words(
    policy: str, history: list[tuple[Any, ...]]
) -> None:
    assert seen_by_b(policy, history, SECRET) == seen_by_b(policy, history, OTHER)


@pytest.mark.parametrize("policy", ["prefix", "sglang_cache_aware", "dynamo_cost", "cost"])
@pytest.mark.parametrize("tier", Tier)
def test_a_tenant_that_shares_the_salt_would_see_it(policy: str, tier: Tier) -> None:
    """The comparison above can tell: with one salt for both, it does."""
    history: list[tuple[Any, ...]] = [("keep", "p1", BLOCKS, tier), ("keep", "b1", BLOCKS, tier)]

    assert seen_by_b(policy, history, SECRET, b"b") != seen_by_b(policy, history, OTHER, b"b")
    assert seen_by_b("cost", [("ask", True)], SECRET, b"b") != seen_by_b("cost", [("ask", True)], OTHER, b"b")


def test_nothing_is_fetched_for_a_tenant_from_the_worker_that_holds_anothers_same_prompt() -> None:
    history: list[tuple[Any, ...]] = [("keep", "d1", BLOCKS, Tier.POOL)]
    world, shared = World("cost", SECRET, b"a"), World("cost", SECRET, b"b")
    for each in (world, shared):
        each.act(history[0])
        each.router.report("d1", WorkerLoad(free_blocks=4096, running_sequences=60))  # too busy to prefill
    world.ask(b"b"), shared.ask(b"b")

    fetched = [
        max(pair.first.fetched_blocks for pair in each.router.explanations.of("b")[0].considered)
        for each in (world, shared)
    ]
    assert fetched == [0, BLOCKS]
