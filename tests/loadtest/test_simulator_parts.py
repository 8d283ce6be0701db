"""The parts of the simulator keep their promises: names are prefixes, pools lose nothing, stretches are their steps."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain_hash import chain_hashes
from common.errors import ConfigError
from loadtest.content import Segment, TokenPrompt, content_id, token_ids
from loadtest.simulator.events import Timeline
from loadtest.simulator.names import block_names
from loadtest.simulator.pool import Lease, SimulatedPool
from loadtest.simulator.profile import StepCost, load_profile, shipped
from loadtest.simulator.stretch import Stretch

COST = StepCost(base_s=0.01, token_s=0.001, attention_s=1e-6, sequence_s=0.002, context_s=1e-5)
CONTENTS = st.integers(0, 3).map(lambda number: content_id("test", number))
PARTS = st.lists(st.builds(Segment, CONTENTS, st.integers(1, 40)), min_size=1, max_size=5)


def num_shared(a: Sequence[object], b: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@given(PARTS, PARTS, st.sampled_from([1, 8, 16]))
def test_names_are_shared_exactly_where_the_tokens_chain_hashes_are(
    first: list[Segment], second: list[Segment], block_tokens: int
) -> None:
    names, hashes = [], []
    for parts in (first, second):
        ids = token_ids(TokenPrompt(tuple(parts)), 49_152)
        names.append(block_names(parts, block_tokens, len(ids) // block_tokens))
        hashes.append(chain_hashes(ids, block_tokens))

    assert [len(item) for item in names] == [len(item) for item in hashes]
    assert num_shared(*names) == num_shared(*hashes)


def test_events_run_in_order_of_time_and_then_of_asking() -> None:
    timeline, seen = Timeline(), list[tuple[float, str]]()

    def note(name: str) -> None:
        seen.append((timeline.now(), name))

    timeline.at(2, lambda: note("late"))
    timeline.at(1, lambda: note("early"))
    timeline.at(1, lambda: timeline.after(0, lambda: note("asked for last")))
    timeline.at(1, lambda: note("second"))
    timeline.run()

    assert seen == [(1, "early"), (1, "second"), (1, "asked for last"), (2, "late")]


@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 100_000), st.floats(0, 1.2))
def test_a_stretch_is_its_steps_one_by_one(num_steps: int, sequences: int, context: int, share: float) -> None:
    stretch = Stretch.of(COST, 5, 100.0, num_steps, sequences, context, 0.0)
    ends = [100.0]
    for step in range(num_steps):
        ends.append(ends[-1] + COST.base_s + COST.decode_s(sequences, context + step * sequences))
    now = 100.0 + share * (ends[-1] - 100.0)

    begun = stretch.steps_begun(now)

    assert [stretch.end_of(count) for count in range(num_steps + 1)] == pytest.approx(ends)
    assert ends[begun] >= now - 1e-6 or begun == num_steps
    assert begun == 1 or ends[begun - 1] <= now + 1e-6


class Mirror:
    """What a listener knows from events alone."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def changed(self, stored: bool, names: Sequence[bytes]) -> None:
        for name in names:
            assert (name in self.held) is not stored
        self.held = self.held | set(names) if stored else self.held - set(names)


@given(st.integers(0, 2**32), st.integers(4, 20))
def test_a_pool_never_overfills_and_its_events_tell_what_it_holds(seed: int, num_blocks: int) -> None:
    rng, mirror = Random(seed), Mirror()
    pool = SimulatedPool(num_blocks, mirror)
    leases: list[Lease] = []
    for _ in range(60):
        if leases and rng.random() < 0.4:
            pool.release(leases.pop(rng.randrange(len(leases))))
        else:
            chain = [f"{rng.randrange(3)}/{depth}".encode() for depth in range(rng.randrange(1, 6))]
            available, lease = pool.num_available, pool.reserve(chain, len(chain) + 1)
            if lease is None:
                assert len(chain) + 1 > available - len(chain)
                assert pool.num_available == available
            else:
                assert len(lease.names) + lease.num_private == len(chain) + 1
                if rng.random() < 0.8:
                    pool.seal(lease, chain)
                leases.append(lease)
        pool.check(is_idle=not leases)
        for chain_number in range(3):
            names = [f"{chain_number}/{depth}".encode() for depth in range(6)]
            assert pool.match(names) == num_shared(names, [name if name in mirror.held else b"" for name in names])
    for lease in leases:
        pool.release(lease)
    pool.check(is_idle=True)
    assert pool.num_available == num_blocks


def test_a_full_pool_evicts_the_deepest_block_of_the_oldest_chain_first() -> None:
    pool = SimulatedPool(4, Mirror())
    for chain in ([b"a0", b"a1"], [b"b0", b"b1"]):
        lease = pool.reserve(chain, 2)
        assert lease is not None
        pool.seal(lease, chain)
        pool.release(lease)

    pool.reserve([b"c0"], 1)

    assert pool.match([b"a0", b"a1"]) == 1
    assert pool.match([b"b0", b"b1"]) == 2


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles_load_and_say_where_their_numbers_come_from(name: str) -> None:
    profile = load_profile(name)

    assert profile.name == name
    assert len(profile.sources) > 100


def test_a_bad_profile_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ncolour: red\n")

    with pytest.raises(ConfigError, match="colour"):
        load_profile(str(path))
    with pytest.raises(ConfigError, match="shipped: h100-8b, two-core-cpu"):
        load_profile("absent")
