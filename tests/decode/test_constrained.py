"""A grammar's state moves with the sequence: the output is the same, and obeys, wherever each token was chosen."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer

from baton_pb.v1 import common_pb2
from common.errors import InvalidRequestError
from common.grammar import Form, constraint_of, json_form
from common.tiny_text import write_tokenizer
from engine.grammar import Grammars
from tests.decode.serving import Answer, Gate, Gateway, serving, until_changed

PROMPT = list(range(100, 130))
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["block", "prefix"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 4},
    },
    "required": ["kind", "counts"],
    "additionalProperties": False,
}
CONSTRAINT = constraint_of(json_form(SCHEMA, "schema"))
RULES: dict[str, Any] = {"temperature": 1.0, "seed": 5, "constraint": CONSTRAINT, "max_tokens": 90}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def _grammars(folder: Path, max_lexer_states: int = 10_000) -> Grammars:
    tokenizer = llguidance.LLTokenizer(str(folder / "tokenizer.json"), n_vocab=1000, eos_token=[0])
    return Grammars(tokenizer, llguidance.LLParserLimits(max_lexer_states=max_lexer_states))


def _text(folder: Path, tokens: list[int]) -> str:
    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens))


def _assert_obeys(folder: Path, answer: Answer) -> None:
    assert answer.finished is not None, answer.error
    assert answer.finished.reason == common_pb2.FINISH_REASON_STOP
    value = json.loads(_text(folder, answer.tokens))
    assert value["kind"] in ("block", "prefix")
    assert all(0 <= count <= 999 for count in value["counts"])


def test_constrained_output_with_remote_prefill_equals_the_colocated_output_of_the_same_seed(
    tokenizer_dir: Path,
) -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.grammars = lambda: _grammars(tokenizer_dir)
            prefill, decode = await bench.prefill(), await bench.decode()
            both = await bench.decode("both-0", is_colocated=True)
            async with Gateway(decode.address) as gateway, Gateway(both.address) as other:
                remote = await gateway.ask("remote", PROMPT, prefill, **RULES)
                colocated = await other.ask("colocated", PROMPT, **RULES)

                _assert_obeys(tokenizer_dir, remote)
                assert remote.tokens == colocated.tokens

    asyncio.run(main())


def test_a_sequence_that_moved_after_any_of_its_tokens_goes_on_as_if_it_had_stayed(tokenizer_dir: Path) -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.grammars = lambda: _grammars(tokenizer_dir)
            prefill, decode = await bench.prefill(num_blocks=256), await bench.decode(num_blocks=256)
            async with Gateway(decode.address) as gateway:
                whole = await gateway.ask("whole", PROMPT, prefill, **RULES)
                _assert_obeys(tokenizer_dir, whole)
                for count in range(1, len(whole.tokens)):
                    for target in (None, prefill):
                        moved = await gateway.ask(
                            f"{count} {target is None}",
                            PROMPT + whole.tokens[:count],
                            target,
                            num_prompt_tokens=len(PROMPT),
                            **RULES,
                        )
                        assert whole.tokens[:count] + moved.tokens == whole.tokens

    asyncio.run(main())


def test_preempted_sequences_still_obey_and_lose_no_token(tokenizer_dir: Path) -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.grammars = lambda: _grammars(tokenizer_dir)
            prefill, roomy = await bench.prefill(), await bench.decode("roomy", num_blocks=256)
            gate = Gate()
            tight = await bench.decode("tight", num_blocks=28, on_step=gate)
            seeds = range(6)
            async with Gateway(roomy.address) as gateway, Gateway(tight.address) as narrow:
                alone = [
                    (await gateway.ask(f"alone {seed}", PROMPT[:9], prefill, **{**RULES, "seed": seed})).tokens
                    for seed in seeds
                ]
                gate.close()
                for seed in seeds:
                    await narrow.start(f"r{seed}", PROMPT[:9], prefill if seed % 2 else None, **{**RULES, "seed": seed})
                await until_changed(tight, lambda: tight.loop.load().running_sequences == len(seeds))
                gate.open()  # now all of them grow together, in a pool that cannot hold them
                answers = await narrow.over(*(f"r{seed}" for seed in seeds))

                assert [answer.tokens for answer in answers] == alone
                assert tight.loop.load().counters["preemptions_total"] > 0
                for answer in answers:
                    _assert_obeys(tokenizer_dir, answer)

    asyncio.run(main())


def test_the_first_token_alone_may_complete_the_grammar_and_the_stop_token_ends_it_in_spite_of_min_tokens(
    tokenizer_dir: Path,
) -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.grammars = lambda: _grammars(tokenizer_dir)
            prefill, decode = await bench.prefill(), await bench.decode()
            async with Gateway(decode.address) as gateway:
                rules: dict[str, Any] = {
                    "constraint": constraint_of(Form('start: "a"')),
                    "min_tokens": 10,
                    "max_tokens": 20,
                }
                for target in (None, prefill):
                    answer = await gateway.ask(f"r{target is None}", PROMPT, target, **rules)

                    assert [_text(tokenizer_dir, answer.tokens), answer.tokens[1:]] == ["a", [0]]
                    assert answer.finished is not None
                    assert answer.finished.reason == common_pb2.FINISH_REASON_STOP

    asyncio.run(main())


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("rule", [r"/([a-z]{1,9} [0-9]{1,9}){99}/", "nobody"], ids=["too complex", "not valid"])
def test_a_grammar_that_cannot_be_obeyed_ends_its_own_request_only(
    tokenizer_dir: Path, is_remote: bool, rule: str
) -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.grammars = lambda: _grammars(tokenizer_dir, max_lexer_states=400)
            prefill, decode = await bench.prefill(num_blocks=256), await bench.decode(num_blocks=256)
            target = prefill if is_remote else None
            async with Gateway(decode.address) as gateway:
                await gateway.start("neighbour", PROMPT, target, **RULES)
                bad = {**RULES, "constraint": constraint_of(Form(f"start: {rule}")), "max_tokens": 900}
                answer = await gateway.ask("bad", PROMPT[:5], target, **bad)
                [neighbour] = await gateway.over("neighbour")

                assert isinstance(answer.error, InvalidRequestError)
                assert re.match("grammar is (too complex after|not valid)", answer.error.message)
                _assert_obeys(tokenizer_dir, neighbour)

    asyncio.run(main())


def test_a_worker_without_a_tokenizer_refuses_a_grammar() -> None:
    async def main() -> None:
        async with serving() as bench:
            prefill, decode = await bench.prefill(), await bench.decode()
            async with Gateway(decode.address) as gateway:
                for target in (None, prefill):
                    answer = await gateway.ask(f"r{target is None}", PROMPT, target, **RULES)
                    assert isinstance(answer.error, InvalidRequestError)
                    assert "grammar is not possible" in answer.error.message

    asyncio.run(main())
