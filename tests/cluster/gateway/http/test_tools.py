"""Tools and thinking, through the `openai` client and over gRPC: calls and thoughts are told apart from the text."""

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import llguidance
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from baton_pb.v1 import common_pb2, inference_pb2
from cluster.fake_model import write_model
from cluster.fake_worker import FakeModel
from common.errors import InvalidRequestError
from common.text import Text
from tests.cluster.fake_cluster import FakeCluster, fake_cluster, run
from tests.cluster.gateway.http.test_openai_client import client_of, says

ROME: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Rome?"}]
WINDOW = 4096
SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}{{ m.tool_call_id }}\n{% endfor %}"
    "assistant:{% if think is not defined %}{% elif think %}<think>\n{% else %}<think>\n</think>\n{% endif %}"
)


def _write(folder: Path, template: str | None = None) -> Path:
    """Write a model with room for tools in its window."""
    write_model(folder)
    for name, changes in (
        ("config.json", {"max_position_embeddings": WINDOW}),
        ("tokenizer_config.json", {} if template is None else {"chat_template": template}),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows neither."""
    return _write(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def thinking_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools and thinking."""
    return _write(tmp_path_factory.mktemp("thinking"), TEMPLATE)


def roomy_cluster(folder: Path, **gateway: Any) -> AbstractAsyncContextManager[FakeCluster]:
    """Start a cluster around the model that `_write` wrote."""
    model = FakeModel(context_tokens=WINDOW, eos_token_ids=frozenset({3}))
    return fake_cluster(folder, model=model, **gateway)


def prompt_of(cluster: FakeCluster, model_dir: Path) -> str:
    """Return the prompt of the last request."""
    started = cluster.worker("d0").started[-1]
    return Text.load(model_dir).decode(list(started.token_ids), skip_special_tokens=False)


def allows(cluster: FakeCluster, text: str) -> bool:
    """Say whether the last request's constraint allows a text."""
    constraint = cluster.worker("d0").started[-1].sampling.constraint
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), constraint, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def test_a_call_is_a_call_and_the_rest_is_content(model_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, f"Let me see.\n{CALL}")

            answer = await client.chat.completions.create(model="fake", messages=ROME, tools=TOOLS)

            [choice] = answer.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
            [call] = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.id.startswith("call_")
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
            assert '"name": "get_weather", "description": "Now."' in prompt_of(cluster, model_dir)

    run(scenario())


def test_a_streamed_call_comes_piece_by_piece_and_adds_up(model_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, f"{CALL}\n{CALL.replace('Rome', 'Oslo')}")
            cluster.worker("d0").step_s = 0.001

            async with client.chat.completions.stream(model="fake", messages=ROME, tools=TOOLS) as stream:
                events = [event.type async for event in stream]
                answer = await stream.get_final_completion()

            [choice] = answer.choices
            assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
            calls = choice.message.tool_calls or []
            assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
            assert len({call.id for call in calls}) == 2
            assert events.count("tool_calls.function.arguments.delta") > 4

    run(scenario())


def test_parallel_tool_calls_false_leaves_the_first_call(model_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, CALL + CALL)

            answer = await client.chat.completions.create(
                model="fake", messages=ROME, tools=TOOLS, parallel_tool_calls=False
            )

            assert len(answer.choices[0].message.tool_calls or []) == 1

    run(scenario())


def test_what_must_be_called_is_a_constraint(model_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:

            async def ask(**options: Any) -> None:
                says(cluster, model_dir, CALL)
                await client.chat.completions.create(model="fake", messages=ROME, tools=TOOLS, **options)

            stop = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
            await ask(tool_choice="required")
            assert [allows(cluster, text) for text in (CALL, stop, f"{CALL}\n{stop}", "It rains.")] == [True] * 3 + [
                False
            ]
            await ask(tool_choice={"type": "function", "function": {"name": "stop"}})
            assert [allows(cluster, text) for text in (stop, CALL, f"{stop}\n{stop}")] == [True, False, False]
            await ask(tool_choice="required", parallel_tool_calls=False)
            assert not allows(cluster, f"{CALL}\n{stop}")
            await ask(response_format={"type": "json_object"})
            assert [allows(cluster, text) for text in (CALL, '{"a": 1}', "It rains.")] == [True, True, False]
            await ask()
            assert not cluster.worker("d0").started[-1].sampling.constraint

    run(scenario())


def test_a_schema_that_cannot_be_obeyed_is_named_where_a_call_is_demanded(model_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:
            wrong = {"type": "object", "properties": {"city": {"type": "array", "uniqueItems": True}}}
            tools: Any = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": wrong}}]

            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="fake", messages=ROME, tools=tools, tool_choice="required")
            assert caught.value.param == "tools[1].function.parameters.properties.city.uniqueItems"

            says(cluster, model_dir, "no")
            await client.chat.completions.create(model="fake", messages=ROME, tools=tools)

    run(scenario())


class City(pydantic.BaseModel):
    """Arguments of a call."""

    city: str


class Weather(pydantic.BaseModel):
    """What parse returns."""

    city: str
    degrees: int


def test_parse_gives_pydantic_models_from_answers_and_from_calls(model_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, '{"city": "Rome", "degrees": 31}')
            answer = await client.chat.completions.parse(model="fake", messages=ROME, response_format=Weather)
            assert answer.choices[0].message.parsed == Weather(city="Rome", degrees=31)
            assert allows(cluster, '{"city": "Oslo", "degrees": -3}')
            assert not allows(cluster, '{"city": "Oslo"}')

            says(cluster, model_dir, CALL.replace("get_weather", "Weather").replace('"Rome"', '"Rome", "degrees": 31'))
            called = await client.chat.completions.parse(
                model="fake", messages=ROME, tools=[openai.pydantic_function_tool(Weather)]
            )
            [call] = called.choices[0].message.tool_calls or []
            assert call.function.parsed_arguments == Weather(city="Rome", degrees=31)

    run(scenario())


TURNS: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    *ROME,
    {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "31 degrees"},
]


def test_a_template_that_knows_tools_gets_calls_and_results_as_they_are(thinking_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(thinking_dir) as cluster, client_of(cluster) as client:
            says(cluster, thinking_dir, "ok")
            await client.chat.completions.create(model="fake", messages=TURNS, tools=TOOLS)

            assert prompt_of(cluster, thinking_dir) == (
                "[get_weather][stop]system:Be brief.\nuser:Rome?\n"
                "assistant:One moment.(c1 get_weather Rome)\ntool:31 degreesc1\nassistant:"
            )

    run(scenario())


@pytest.mark.parametrize("way", ["whole", "stream", "parse"])
def test_an_answer_may_be_sent_back_as_the_client_gave_it(model_dir: Path, way: str) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, f"Let me see.\n{CALL}")
            if way == "stream":
                async with client.chat.completions.stream(model="fake", messages=ROME, tools=TOOLS) as stream:
                    said: Any = (await stream.get_final_completion()).choices[0].message
            elif way == "parse":
                tools: Any = [openai.pydantic_function_tool(City, name="get_weather")]
                said = (
                    (await client.chat.completions.parse(model="fake", messages=ROME, tools=tools)).choices[0].message
                )
            else:
                said = (
                    (await client.chat.completions.create(model="fake", messages=ROME, tools=TOOLS)).choices[0].message
                )
            result: Any = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "31"}

            for message in (said, said.model_dump()):
                says(cluster, model_dir, "Hot.")
                answer = await client.chat.completions.create(model="fake", messages=[*ROME, message, result])

                assert answer.choices[0].message.content == "Hot."
                assert f"Let me see.\n{CALL}" in prompt_of(cluster, model_dir)

    run(scenario())


def test_a_template_that_knows_no_tools_gets_them_in_words(model_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(model_dir) as cluster, client_of(cluster) as client:
            says(cluster, model_dir, "ok")
            await client.chat.completions.create(model="fake", messages=TURNS, tools=TOOLS)

            prompt = prompt_of(cluster, model_dir)
            assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
            assert f"<|im_start|>assistant\nOne moment.\n{CALL}<|im_end|>" in prompt
            assert "<|im_start|>user\n<tool_response>\n31 degrees\n</tool_response><|im_end|>" in prompt

    run(scenario())


def test_tool_choice_none_offers_nothing_and_reads_no_calls(thinking_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(thinking_dir) as cluster, client_of(cluster) as client:
            says(cluster, thinking_dir, CALL)
            answer = await client.chat.completions.create(model="fake", messages=ROME, tools=TOOLS, tool_choice="none")

            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
            assert prompt_of(cluster, thinking_dir) == "user:Rome?\nassistant:"

    run(scenario())


@pytest.mark.parametrize(
    ("arguments", "said", "thought"),
    [
        ({}, "<think>\nSunny?\n</think>\n\nYes.", "Sunny?"),
        ({"think": True}, "Sunny?\n</think>\n\nYes.", "Sunny?"),
        ({"think": False}, "Yes.", None),
    ],
)
def test_thinking_is_reasoning_content(
    thinking_dir: Path, arguments: dict[str, bool], said: str, thought: str | None
) -> None:
    async def scenario() -> None:
        async with roomy_cluster(thinking_dir) as cluster, client_of(cluster) as client:
            options: dict[str, Any] = {"model": "fake", "messages": ROME}
            options["extra_body"] = {"chat_template_kwargs": arguments, "guided_regex": "Yes|No"}
            says(cluster, thinking_dir, said)
            answer = await client.chat.completions.create(**options)
            says(cluster, thinking_dir, said)
            deltas = [
                chunk.choices[0].delta async for chunk in await client.chat.completions.create(**options, stream=True)
            ]

            message = answer.choices[0].message
            assert (message.content, getattr(message, "reasoning_content", None)) == ("Yes.", thought)
            assert getattr(message, "reasoning", None) == thought
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (thought or "")
            assert "".join(delta.content or "" for delta in deltas) == "Yes."
            assert answer.usage is not None
            assert answer.usage.completion_tokens_details is not None
            assert bool(answer.usage.completion_tokens_details.reasoning_tokens) == (thought is not None)
            # The grammar holds for the answer, and leaves the thinking free.
            assert allows(cluster, said.removesuffix("Yes.") + "No")
            assert not allows(cluster, said.removesuffix("Yes.") + "Perhaps")

    run(scenario())


def test_thinking_may_be_left_in_the_text(thinking_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(thinking_dir, reasoning="none") as cluster, client_of(cluster) as client:
            says(cluster, thinking_dir, "<think>a</think>b")
            answer = await client.chat.completions.create(model="fake", messages=ROME)

            assert answer.choices[0].message.content == "<think>a</think>b"

    run(scenario())


def test_the_same_over_grpc(thinking_dir: Path) -> None:
    async def scenario() -> None:
        async with roomy_cluster(thinking_dir) as cluster:
            says(cluster, thinking_dir, f"<think>Hm.</think>\n{CALL}")
            tool = inference_pb2.Tool(name="get_weather", parameters=json.dumps(SCHEMA))
            rome = inference_pb2.ChatMessage(role="user", parts=[inference_pb2.ContentPart(text="Rome?")])
            asked = inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatMessages(messages=[rome]),
                tools=[tool],
                tool_choice=inference_pb2.ToolChoice(name="get_weather"),
            )
            answer = await cluster.ask(asked)

            calls = [piece for response in answer.responses for piece in response.tool_calls]
            assert "".join(response.reasoning for response in answer.responses) == "Hm."
            assert answer.text == ""
            assert (calls[0].index, calls[0].name, calls[0].id[:5]) == (0, "get_weather", "call_")
            assert json.loads("".join(piece.arguments for piece in calls)) == {"city": "Rome"}
            assert answer.finished.reason == common_pb2.FINISH_REASON_TOOL_CALLS
            assert answer.finished.usage.reasoning_tokens > 0
            assert allows(cluster, f"<think>so</think>\n{CALL}")

            asked.tool_choice.name = "other"
            with pytest.raises(InvalidRequestError, match="tool_choice must name one of the tools"):
                await cluster.ask(asked)
            with pytest.raises(InvalidRequestError, match="tools is for chats"):
                await cluster.ask(inference_pb2.GenerateRequest(text="a", tools=[tool]))

    run(scenario())
