"""Workloads follow from their seed and keep to the lengths and sharing that they were asked for."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from loadtest.content import ChatPrompt, Segment, TokenPrompt
from loadtest.workload import ConversationWorkload, Session, SyntheticWorkload, parse_workload, take


def first_prompt(session: Session) -> TokenPrompt:
    prompt = session.turns[0].prompt
    assert isinstance(prompt, TokenPrompt)
    return prompt


@pytest.mark.parametrize(
    "spec", ["synthetic:prefixes=3,prefix_tokens=64,spread=0.5", "conversation:turns=3,spread=0.2"]
)
def test_the_same_seed_asks_the_same_and_another_something_else(spec: str) -> None:
    workload = parse_workload(spec)

    first, again, other = (list(take(workload, seed, 8192, 20)) for seed in (1, 1, 2))

    assert first == again
    assert first != other


@given(st.integers(2, 500), st.floats(0, 0.9), st.integers(0, 9))
def test_synthetic_lengths_stay_within_their_spread(tokens: int, spread: float, seed: int) -> None:
    workload = SyntheticWorkload(prompt_tokens=tokens, output_tokens=tokens, spread=spread)

    for session in take(workload, seed, 8192, 20):
        for length in (first_prompt(session).num_tokens, session.turns[0].output_tokens):
            assert max(1, tokens * (1 - spread) - 1) <= length <= tokens * (1 + spread) + 1


def test_synthetic_prompts_share_the_prefixes_asked_for_and_nothing_else() -> None:
    workload = SyntheticWorkload(prompt_tokens=100, prefixes=3, prefix_tokens=64)
    heads, tails = Counter[Segment](), Counter[Segment]()

    for session in take(workload, 0, 8192, 300):
        head, tail = first_prompt(session).parts
        assert isinstance(head, Segment)
        assert isinstance(tail, Segment)
        heads[head] += 1
        tails[tail] += 1

    assert len(heads) == 3
    assert {head.num_tokens for head in heads} == {64}
    assert len(tails) == 300


def test_only_the_first_turn_of_a_conversation_carries_the_system_prompt() -> None:
    session = next(iter(ConversationWorkload(turns=3, system_tokens=10, user_tokens=5).sessions(0, 8192)))

    assert [turn.prompt.num_tokens for turn in session.turns if isinstance(turn.prompt, TokenPrompt)] == [15, 5, 5]


def test_a_chat_conversation_begins_with_a_system_message() -> None:
    session = next(iter(ConversationWorkload(turns=2, form="chat").sessions(0, 8192)))

    roles = [[m.role for m in turn.prompt.messages] for turn in session.turns if isinstance(turn.prompt, ChatPrompt)]
    assert roles == [["system", "user"], ["user"]]


def test_a_user_thinks_before_each_turn_but_the_first() -> None:
    session = next(iter(ConversationWorkload(turns=3, think_s=2).sessions(0, 8192)))

    assert [turn.think_s > 0 for turn in session.turns] == [False, True, True]


def test_a_trace_workload_ends_and_carries_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [0]}\n'
        '{"timestamp": 500, "input_length": 9000, "output_length": 4, "hash_ids": '
        "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}\n"
    )

    everything = list(parse_workload(f"mooncake:path={path}").sessions(0, 1024))
    short_ones = list(parse_workload(f"mooncake:path={path},longest=600").sessions(0, 1024))

    assert [session.at_s for session in everything] == [0.0, 0.5]
    assert [first_prompt(session).num_tokens for session in everything] == [48, 844]
    assert [first_prompt(session).num_tokens for session in short_ones] == [512]


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,8,4\n2023-11-16 18:15:47,8,4\n")

    first, second = islice(parse_workload(f"azure:path={path}").sessions(0, 1024), 2)

    assert first_prompt(first).parts != first_prompt(second).parts


def test_prompt_files_keep_their_own_output_lengths(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": "b"}\n')

    sessions = parse_workload(f"prompts:path={path},output_tokens=9").sessions(0, 1024)

    assert [session.turns[0].output_tokens for session in sessions] == [3, 9]


def test_a_prefix_as_long_as_the_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefix_tokens"):
        parse_workload("synthetic:prompt_tokens=64,prefixes=1,prefix_tokens=64")
