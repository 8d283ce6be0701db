"""Each way to say what an answer must look like reaches the workers as a constraint, or is refused by its own name."""

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest

from baton_pb.v1.common_pb2 import Choices, Grammar
from common.errors import InvalidRequestError
from tests.cluster.fake_cluster import fake_cluster, request, run
from tests.cluster.gateway.http.wire import post

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
WRONG = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
JSON_TEXTS = ['{"a": "x"}', '{"a": "z"}']
ASKED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        JSON_TEXTS,
    ),
    ({"response_format": {"type": "json_object"}}, ['{"b": [1]}', "[1]"]),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, ["{}", "3"]),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_TEXTS),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON_TEXTS),
    ({"structured_outputs": {"regex": "[a-c]+"}}, ["abc", "x"]),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["no", "maybe"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, ["b", "c"]),
    ({"structured_outputs": {"json_object": True}}, ["{}", "3"]),
    ({"guided_json": SCHEMA}, JSON_TEXTS),
    ({"guided_regex": "[a-c]+"}, ["abc", "x"]),
    ({"guided_choice": ["yes", "no"]}, ["yes", "maybe"]),
    ({"guided_grammar": 'start: "a" | "b"'}, ["a", "c"]),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"name": "s"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": WRONG}}},
        "response_format.json_schema.schema.properties.a.uniqueItems",
    ),
    ({"guided_json": WRONG}, "guided_json.properties.a.uniqueItems"),
    ({"structured_outputs": {"json": WRONG}}, "structured_outputs.json.properties.a.uniqueItems"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"guided_grammar": "start: nobody"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_json": {"description": "x" * 70_000}}, "guided_json"),
]


def _accepts(constraint: str, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, constraint)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def test_each_form_reaches_the_workers_as_a_constraint(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            for fields, (good, bad) in ASKED:
                for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})):
                    answer = await post(cluster, path, {**body, **fields})

                    assert answer.status == 200, (fields, answer.body)
                    sampling = cluster.worker("d0").started[-1].sampling
                    assert not sampling.HasField("grammar")
                    assert _accepts(sampling.constraint, good), fields
                    assert not _accepts(sampling.constraint, bad), fields

    run(scenario())


def test_what_cannot_be_obeyed_is_refused_by_the_name_that_the_client_used(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            for fields, param in REFUSED:
                answer = await post(cluster, "/v1/chat/completions", {**CHAT, **fields})

                assert (answer.status, answer.error["param"]) == (400, param), answer.error
            assert cluster.worker("d0").started == []

    run(scenario())


def test_a_stream_that_goes_on_at_another_worker_takes_its_constraint_along(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir, num_decode=2) as cluster:
            for worker in cluster.workers.values():
                worker.step_s = 0.01
            call = cluster.call(request(grammar=Grammar(json_schema=json.dumps(SCHEMA)), max_tokens=60))
            responses = [await anext(aiter(call)) for _ in range(3)]
            victim, heir = sorted(("d0", "d1"), key=lambda name: -cluster.worker(name).num_running)

            await cluster.worker(victim).kill()
            responses += [response async for response in call]

            [first], [second] = cluster.worker(victim).started, cluster.worker(heir).started
            assert second.sampling.constraint == first.sampling.constraint != ""
            assert second.num_prompt_tokens == first.num_prompt_tokens < len(second.token_ids)
            assert responses[-1].finished.usage.output_tokens == 60

    run(scenario())


def test_a_grammar_comes_over_grpc_as_well(model_dir: Path) -> None:
    async def scenario() -> None:
        async with fake_cluster(model_dir) as cluster:
            for grammar, (good, bad) in (
                (Grammar(json_schema=json.dumps(SCHEMA)), JSON_TEXTS),
                (Grammar(choice=Choices(texts=["yes", "no"])), ["no", "maybe"]),
            ):
                await cluster.ask(request(grammar=grammar, max_tokens=2))

                constraint = cluster.worker("d0").started[-1].sampling.constraint
                assert _accepts(constraint, good)
                assert not _accepts(constraint, bad)
            for wrong, message in (
                (
                    {"grammar": Grammar(json_schema=json.dumps(WRONG))},
                    "grammar.json_schema.properties.a.uniqueItems is not",
                ),
                ({"grammar": Grammar()}, "grammar has no form"),
                ({"constraint": "{}"}, "constraint is made by the gateway"),
            ):
                with pytest.raises(InvalidRequestError, match=message):
                    await cluster.ask(request(**wrong))

    run(scenario())
