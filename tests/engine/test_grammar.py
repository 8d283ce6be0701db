"""A grammar's mask is a function of the output's tokens, and the sampler chooses nothing that the mask excludes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import BatonError, InvalidRequestError
from common.grammar import CHOICES_MAX, Form, constraint_of, json_form
from common.tiny_text import write_tokenizer
from engine.grammar import CACHED_MAX, Grammars, Matcher
from engine.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

VOCAB = 320
EOS = 0
SAMPLER = Sampler(frozenset({EOS}))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
JSON = constraint_of(json_form(SCHEMA, "schema"))
CONSTRAINTS = [JSON, constraint_of(Form("start: /[a-c]{2,30}x/")), constraint_of(Form('start: "yes" | "no"'))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    made = Grammars.load(folder, VOCAB, frozenset({EOS}))
    assert made is not None
    yield made
    made.close()


def _matchers(grammars: Grammars, constraint: str, count: int) -> list[Matcher]:
    async def main() -> list[Matcher]:
        return [await grammars.matcher(constraint) for _ in range(count)]

    return asyncio.run(main())


def _sequence(grammars: Grammars, rules: SamplingParams, output: list[int]) -> Sequence:
    sequence = Sequence.start("r", [5, 6, *output], 2, rules, 4)
    if rules.constraint is not None:
        [sequence.matcher] = _matchers(grammars, rules.constraint, 1)
    return sequence


def _run(grammars: Grammars, rules: SamplingParams, seed: int, count: int = 80) -> list[int]:
    """Sample from random logits until the end, or `count` tokens."""
    sequence = _sequence(grammars, rules, [])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        [output] = SAMPLER.sample(torch.randn(1, VOCAB, generator=generator) * 3, [sequence])
        assert output.error is None
        sequence.append(output.token_id, 4)
        if output.token_id == EOS:
            break
    return sequence.token_ids[2:]


@settings(max_examples=40, deadline=None)
@given(constraint=st.sampled_from(CONSTRAINTS), draws=st.lists(st.integers(0, VOCAB), max_size=40))
def test_a_fresh_matcher_allows_what_one_that_followed_every_token_allows(
    grammars: Grammars, constraint: str, draws: list[int]
) -> None:
    followed, late = _matchers(grammars, constraint, 2)
    output: list[int] = []
    for draw in draws:
        allowed = np.flatnonzero(np.unpackbits(followed.allowed(output).view(np.uint8), bitorder="little"))
        output.append(int(allowed[draw % len(allowed)]))
        if output[-1] == EOS:
            break

    if EOS not in output:
        assert (late.allowed(output) == followed.allowed(output)).all()
    assert (
        _matchers(grammars, constraint, 1)[0].allowed([]) == _matchers(grammars, constraint, 1)[0].allowed([])
    ).all()


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 1.0, "seed": 3}, id="random"),
        pytest.param({"temperature": 5.0, "top_p": 0.4, "top_k": 3, "min_p": 0.2, "seed": 4}, id="filtered"),
        pytest.param({"repetition_penalty": 0.5, "frequency_penalty": -5.0}, id="penalties"),
        pytest.param({"logit_bias": {7: 1000.0, 9: 1000.0}}, id="bias"),
        pytest.param({"stop_token_ids": frozenset({7}), "min_tokens": 60}, id="min_tokens"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_output_obeys_whatever_else_is_asked(
    folder: Path, grammars: Grammars, rules: dict[str, Any], seed: int
) -> None:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "sizes": {"enum": [[], [1, 2], [3]]}}}  # type: ignore[dict-item]
    constraint = constraint_of(json_form(schema, "schema"))

    output = _run(grammars, SamplingParams(constraint=constraint, **rules), seed, 200)

    assert output[-1] == EOS
    value = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(output))
    assert len(value["name"]) <= 9
    assert value["sizes"] in ([], [1, 2], [3])


def test_min_tokens_holds_back_the_end_where_the_grammar_can_go_on(grammars: Grammars) -> None:
    rules = SamplingParams(constraint=constraint_of(Form("start: /a*/")), min_tokens=20, logit_bias={EOS: 1000.0})

    output = _run(grammars, rules, 1)

    assert output.index(EOS) == 20


def test_rows_without_a_grammar_are_not_touched_and_logprobs_are_the_models_own(grammars: Grammars) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    free, bound = SamplingParams(logprobs=2), SamplingParams(logprobs=2, constraint=CONSTRAINTS[2])
    together = SAMPLER.sample(logits.clone(), [_sequence(grammars, rules, []) for rules in (free, bound, free)])
    plain = SAMPLER.sample(logits.clone(), [_sequence(grammars, free, []) for _ in range(3)])

    assert [together[0], together[2]] == [plain[0], plain[2]]
    assert together[1].top == plain[1].top
    assert together[1].token_id != plain[1].token_id
    assert together[1].logprob == pytest.approx(float(logits.log_softmax(-1)[1, together[1].token_id]))


def test_an_output_that_never_obeyed_fails_its_row_alone(grammars: Grammars) -> None:
    rules = SamplingParams(constraint=CONSTRAINTS[2])
    good, bad = _sequence(grammars, rules, []), _sequence(grammars, rules, [9, 9])

    outputs = SAMPLER.sample(torch.zeros(2, VOCAB), [good, bad])

    assert outputs[0].error is None
    assert type(outputs[1].error) is BatonError


_LEVELS = 200
_AMBIGUOUS = "a0+\n" + "".join(f"a{i}: a{i + 1} | a{i + 1} a{i + 1}\n" for i in range(_LEVELS)) + f"a{_LEVELS}: /[a-z]/"
"""Each mask is reckoned from thousands of ways to read what there is; with a large vocabulary it took 0.4 s."""
_WIDE = " | ".join(f'"a" /{number}b*/' for number in range(3 * CHOICES_MAX))

_ALIKE = " | ".join(f"/[a-z]+{chr(97 + number % 26)}{chr(97 + number // 26)}/" for number in range(500))
"""Any of them may have begun after each letter."""


@pytest.mark.parametrize(
    ("rule", "words"),
    [(_AMBIGUOUS, "after 0 tokens"), (_WIDE, "at token 0"), (_ALIKE, "after 0 tokens")],
    ids=["ambiguous", "wide", "alike"],
)
def test_a_grammar_that_takes_long_to_follow_ends_its_request_as_the_clients_fault(
    folder: Path, grammars: Grammars, rule: str, words: str
) -> None:
    [letter] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a", add_special_tokens=False).ids
    [matcher] = _matchers(grammars, constraint_of(Form(f"start: {rule}")), 1)

    def follow() -> None:
        matcher.allowed([])
        matcher.allowed([letter])

    with pytest.raises(InvalidRequestError, match=f"grammar is too complex {words}"):
        follow()


def test_as_many_choices_as_may_be_given_can_be_followed(folder: Path, grammars: Grammars) -> None:
    texts = [f"a{number}" for number in range(CHOICES_MAX)]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(texts[-1], add_special_tokens=False).ids
    rule = " | ".join(f'"{text}"' for text in texts)
    [matcher] = _matchers(grammars, constraint_of(Form(f"start: {rule}")), 1)

    for count in range(len(ids) + 1):
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed(ids[:count]).view(np.uint8), bitorder="little"))

        assert [*ids, EOS][count] in allowed


def test_more_grammars_than_are_kept_are_compiled_anew_and_wrong_ones_are_refused_each_time(grammars: Grammars) -> None:
    async def main() -> None:
        for number in [*range(CACHED_MAX + 3), 0]:
            await grammars.matcher(constraint_of(Form(f'start: "{number}"')))
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="grammar is not valid"):
                await grammars.matcher(constraint_of(Form("start: nobody")))

    asyncio.run(main())


@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({VOCAB})])
def test_a_model_that_cannot_end_an_output_has_no_grammars(folder: Path, eos: frozenset[int]) -> None:
    assert Grammars.load(folder, VOCAB, eos) is None


def test_a_folder_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    assert Grammars.load(tmp_path, VOCAB, frozenset({EOS})) is None
