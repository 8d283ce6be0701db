"""Policies are pure choices; equals are told apart by chance alone."""

import importlib
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from cluster.router.policies import registry
from cluster.router.policies.policy import Policy
from cluster.router.policies.registry import POLICIES
from cluster.router.prefix_index import PrefixIndex
from cluster.router.question import Candidate, Group, Question
from common.chain_hash import chain_hashes
from common.config import RouterConfig
from common.errors import ConfigError


def candidate(worker_id: str, queued: int = 0, sequences: int = 0, tokens: int = 0, both: bool = False) -> Candidate:
    return Candidate(worker_id, both, queued, sequences, tokens)


def question(
    decode: list[Candidate], prefill: list[Candidate] | None = None, hits: dict[str, int] | None = None
) -> Question:
    """Return a question of 6 blocks; `hits` are leading blocks held, by worker."""
    index = PrefixIndex()
    chain = chain_hashes(range(96), 16)
    for worker_id, num_blocks in (hits or {}).items():
        index.replace(worker_id, chain[:num_blocks])
    return Question(100, 6, Group(decode), Group(prefill or []), index.find(chain), block_tokens=16)


def choose(policy: str, asked: Question) -> tuple[str, str | None]:
    choice = POLICIES[policy]().choose(asked, Random(0))
    return choice.decode.worker_id, None if choice.prefill is None else choice.prefill.worker_id


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        pytest.param(
            "prefix",
            question([candidate("d0"), candidate("d1", sequences=9)], hits={"d0": 2, "d1": 3}),
            ("d1", None),
            id="most cached blocks win over load",
        ),
        pytest.param(
            "prefix",
            question([candidate("d0", sequences=2), candidate("d1", sequences=1)], hits={"d0": 2, "d1": 2}),
            ("d1", None),
            id="then the least load",
        ),
        pytest.param(
            "prefix",
            question([candidate("d0")], [candidate("p0"), candidate("p1", queued=900)], {"p0": 1, "p1": 4}),
            ("d0", "p1"),
            id="the prefiller is chosen likewise",
        ),
        pytest.param(
            "least_loaded",
            question(
                [candidate("d0", sequences=1), candidate("d1")],
                [candidate("p0", queued=5), candidate("p1", queued=4)],
                {"d0": 6},
            ),
            ("d1", "p1"),
            id="least loaded ignores caches",
        ),
        pytest.param(
            "least_loaded",
            question([candidate("d0", sequences=1, tokens=50), candidate("d1", sequences=1, tokens=40)]),
            ("d1", None),
            id="equal sequences, fewer tokens",
        ),
        pytest.param(
            "least_loaded",
            question([candidate("b0", both=True), candidate("d0", sequences=1)], [candidate("p0")]),
            ("b0", None),
            id="a colocated worker prefills itself",
        ),
        pytest.param(
            "sglang_cache_aware",
            question([candidate("d0", sequences=60), candidate("d1")], hits={"d0": 2}),
            ("d0", None),
            id="sglang: a match of more than 0.3 of the prompt wins over load",
        ),
        pytest.param(
            "sglang_cache_aware",
            question([candidate("d0", sequences=60), candidate("d1")], hits={"d0": 1}),
            ("d1", None),
            id="sglang: a shorter match does not count",
        ),
        pytest.param(
            "sglang_cache_aware",
            question([candidate("d0", sequences=65), candidate("d1")], hits={"d0": 6}),
            ("d1", None),
            id="sglang: more than 64 sequences apart, the balance comes first",
        ),
        pytest.param(
            "sglang_cache_aware",
            question([candidate("d0", sequences=64), candidate("d1")], hits={"d0": 6}),
            ("d0", None),
            id="sglang: 64 apart is in balance",
        ),
        pytest.param(
            "sglang_cache_aware",
            question([candidate("d0", sequences=210), candidate("d1", sequences=140)], hits={"d0": 6}),
            ("d0", None),
            id="sglang: 70 apart but 1.5 times as many is in balance",
        ),
        pytest.param(
            "sglang_cache_aware",
            question([candidate("d0", sequences=211), candidate("d1", sequences=140)], hits={"d0": 6}),
            ("d1", None),
            id="sglang: 71 apart and more than 1.5 times as many is not",
        ),
        pytest.param(
            "sglang_cache_aware",
            question(
                [candidate("d0")], [candidate("p0", queued=900, sequences=9), candidate("p1")], {"p0": 2, "d0": 6}
            ),
            ("d0", "p0"),
            id="sglang: the prefiller is chosen likewise",
        ),
        pytest.param(
            "dynamo_cost",
            question([candidate("d0", tokens=16 * 3)], [candidate("p0", queued=16 * 3), candidate("p1")], {"p0": 4}),
            ("d0", "p0"),
            id="dynamo: four blocks held are worth more than three queued",
        ),
        pytest.param(
            "dynamo_cost",
            question([candidate("d0")], [candidate("p0", queued=16 * 5), candidate("p1")], {"p0": 4}),
            ("d0", "p1"),
            id="dynamo: and less than five",
        ),
        pytest.param(
            "dynamo_cost",
            question([candidate("d0", tokens=17), candidate("d1", tokens=16)], [candidate("p0")], {"d0": 6}),
            ("d1", "p0"),
            id="dynamo: where prefill is apart a decoder is chosen by its blocks alone",
        ),
        pytest.param(
            "dynamo_cost",
            question([candidate("d0", tokens=16 * 5), candidate("d1")], hits={"d0": 6}),
            ("d0", None),
            id="dynamo: a decoder that prefills is charged with both",
        ),
        pytest.param(
            "power_of_two",
            question([candidate("d0", sequences=2), candidate("d1", sequences=1)], hits={"d0": 6}),
            ("d1", None),
            id="power of two: of two, the less busy one",
        ),
    ],
)
def test_the_cheapest_is_chosen(name: str, asked: Question, expected: tuple[str, str | None]) -> None:
    assert choose(name, asked) == expected


def test_everybody_has_a_turn() -> None:
    policy, rng = POLICIES["round_robin"](), Random(3)
    asked = question([candidate(f"d{i}") for i in range(3)], [candidate("p0"), candidate("p1")])

    choices = [policy.choose(asked, rng) for _ in range(6)]

    decoders = [choice.decode.worker_id for choice in choices]
    prefillers = [choice.prefill.worker_id for choice in choices if choice.prefill is not None]
    assert sorted(decoders[:3]) == ["d0", "d1", "d2"]
    assert decoders[:3] == decoders[3:]
    assert prefillers[::2] == ["p0"] * 3 or prefillers[::2] == ["p1"] * 3


def test_power_of_two_takes_the_idlest_whenever_it_is_drawn_and_the_busiest_never() -> None:
    policy, rng = POLICIES["power_of_two"](), Random(5)
    asked = question([candidate(f"d{i}", sequences=i) for i in range(3)], [candidate(f"p{i}", i) for i in range(3)])

    choices = [policy.choose(asked, rng) for _ in range(3000)]

    decoders = Counter(choice.decode.worker_id for choice in choices)
    prefillers = Counter(choice.prefill.worker_id for choice in choices if choice.prefill is not None)
    assert set(decoders) == {"d0", "d1"}
    assert set(prefillers) == {"p0", "p1"}
    assert abs(decoders["d0"] - 2000) < 150  # it is in two of the three pairs
    assert abs(prefillers["p0"] - 2000) < 150


def test_equals_are_chosen_equally_often(policy: Policy) -> None:
    asked, rng = (
        question([candidate(f"d{i}", sequences=1) for i in range(4)], hits={f"d{i}": 1 for i in range(4)}),
        Random(1),
    )

    counts = Counter(policy.choose(asked, rng).decode.worker_id for _ in range(4000))

    assert set(counts) == {"d0", "d1", "d2", "d3"}
    assert all(abs(count - 1000) < 100 for count in counts.values())


def test_the_same_seed_gives_the_same_choices(policy: Policy) -> None:
    asked = question([candidate(f"d{i}") for i in range(5)])
    other = POLICIES[policy.name]()

    first, second = Random(7), Random(7)

    for _ in range(20):
        assert policy.choose(asked, first) == other.choose(asked, second)


def test_the_policies_that_exist_are_those_of_the_readme() -> None:
    text = Path(registry.__file__).with_name("README.md").read_text()

    told = re.findall(r"^\| `(\w+)`[^|]*\|", text.partition("## What")[2].partition("## Formula")[0], re.MULTILINE)
    assert sorted(told) == sorted(POLICIES)
    assert RouterConfig().policy in POLICIES


ANOTHER = """
from cluster.router.policies.policy import Choice


class First:
    name = "first"

    def choose(self, question, rng):
        decode = question.decode.members[0]
        return Choice(decode, None if decode.prefills_itself else question.prefill.members[0], "first")
"""


def test_a_policy_is_one_file_and_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "other_policies"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text(ANOTHER)
    monkeypatch.syspath_prepend(tmp_path)

    found = registry.policies_of(importlib.import_module(package.name))

    assert list(found) == ["first"]
    members = Group([Candidate("d0"), Candidate("d1")]), Group([Candidate("p0"), Candidate("p1")])
    choice = found["first"]().choose(Question(16, 1, *members), Random(0))
    assert choice.prefill is not None
    assert (choice.decode.worker_id, choice.prefill.worker_id) == ("d0", "p0")


def test_a_name_that_no_policy_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'best'; there are cost, dynamo_cost, .*sglang_cache_aware"):
        registry.policy_named("best")
