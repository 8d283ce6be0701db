"""The parts of the simulator keep their promises: names are prefixes, stretches are their steps."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chain_hash import chain_hashes
from common.errors import ConfigError
from loadtest.content import Segment, TokenPrompt, content_id, token_ids
from loadtest.simulator.events import Timeline
from loadtest.simulator.names import block_names
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
    stretch = Stretch.of(COST, 100.0, num_steps, sequences, context, 0.0)
    ends = [100.0]
    for step in range(num_steps):
        ends.append(ends[-1] + COST.base_s + COST.decode_s(sequences, context + step * sequences))
    now = 100.0 + share * (ends[-1] - 100.0)

    begun = stretch.steps_begun(now)

    assert [stretch.end_of(count) for count in range(num_steps + 1)] == pytest.approx(ends)
    assert ends[begun] >= now - 1e-6 or begun == num_steps
    assert begun == 1 or ends[begun - 1] <= now + 1e-6


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
    with pytest.raises(
        ConfigError, match=r"^profile 'absent' is no file \(no such .*\), nor one of h100-8b, two-core-cpu"
    ):
        load_profile("absent")
