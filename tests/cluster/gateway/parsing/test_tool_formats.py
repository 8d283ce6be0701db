"""The calls of each family of models are found, whatever the pieces in which the text arrives."""

import json
from collections.abc import Callable
from itertools import count, pairwise

import llguidance
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.gateway.parsing.hermes import HermesFormat, HermesParser
from cluster.gateway.parsing.interface import Parsed, TextParser, Tool, ToolFormat
from cluster.gateway.parsing.llama3 import Llama3Format, Llama3Parser
from cluster.gateway.parsing.mistral import MistralFormat, MistralParser
from cluster.gateway.parsing.thinking import ThinkingParser
from common.grammar import constraint_of, quoted

NAMES = frozenset({"f", "get_weather"})


def _ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"id{next(numbers)}"


PARSERS: dict[str, Callable[[], TextParser]] = {
    "hermes": lambda: HermesParser(_ids()),
    "llama3": lambda: Llama3Parser(NAMES, _ids()),
    "mistral": lambda: MistralParser(_ids()),
    "thinking": lambda: ThinkingParser(None, is_open=False),
    "thinking goes on": lambda: ThinkingParser(None, is_open=True),
    "thinking, hermes": lambda: ThinkingParser(HermesParser(_ids()), is_open=False),
}
FORMATS: dict[str, ToolFormat] = {"hermes": HermesFormat(), "llama3": Llama3Format(), "mistral": MistralFormat()}


def _result(parser: TextParser, pieces: list[str]) -> tuple[str, str, list[list[str]]]:
    """Return text, thinking, and id, name and arguments of each call."""
    parsed = sum((parser.push(piece) for piece in pieces), Parsed()) + parser.finish()
    calls: list[list[str]] = []
    for piece in parsed.calls:
        if piece.index == len(calls):
            assert piece.call_id
            assert piece.name
            calls.append([piece.call_id, piece.name, ""])
        else:
            assert (piece.index, piece.call_id, piece.name) == (len(calls) - 1, "", "")
        calls[-1][2] += piece.arguments
    return parsed.text, parsed.reasoning, calls


CASES = [
    ("hermes", 'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Hi.", [["f", '{"a": 1}']]),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n'
        '<tool_call>{"arguments": {"b": "}\\""}, "name": "g"}</tool_call> ok ',
        "ok ",
        [["f", "{}"], ["g", '{"b": "}\\""}']],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": null}]</tool_call>',
        "",
        [["f", '{"a": [1]}'], ["g", "{}"]],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [["f", '{"a": 1}']]),
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g"}', "", [["f", "{}"], ["g", "{}"]]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [["f", '{"a": 1']]),
    ("hermes", '<tool_call>{"name": "f", "x": 5 7} more</tool_call>', "} more</tool_call>", [["f", ""]]),
    ("hermes", "a < b <tool_cal or <tool_call>{not json} c", "a < b <tool_cal or<tool_call>{not json} c", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", "only text  ", "only text  ", []),
    ("hermes", "x <tool_call>", "x<tool_call>", []),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "get_weather"}',
        "",
        [["f", "{}"], ["get_weather", "{}"]],
    ),
    ("llama3", '{"type": "function", "name": "f", "parameters": {}} done', "done", [["f", "{}"]]),
    ("llama3", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama3", '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    ("llama3", ' The call is {"name": "f"}', ' The call is {"name": "f"}', []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3", "", "", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [["f", '{"a": 1}'], ["g", "{}"]],
    ),
    ("mistral", 'Hm. [TOOL_CALLS] f{"a": {}}[TOOL_CALLS]g[ARGS]{}', "Hm.", [["f", '{"a": {}}'], ["g", "{}"]]),
    ("mistral", '[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{"a": 1} bye', "bye", [["g", '{"a": 1}']]),
    ("mistral", "[TOOL_CALLS] not one {call}", "[TOOL_CALLS] not one {call}", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("mistral", "[TOOL", "[TOOL", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_and_content_are_told_apart_however_the_text_arrives(
    name: str, text: str, content: str, calls: list[list[str]]
) -> None:
    want = (content, "", [[f"id{number}", *call] for number, call in enumerate(calls)])

    assert _result(PARSERS[name](), [text]) == want
    assert _result(PARSERS[name](), list(text)) == want


@pytest.mark.parametrize(
    ("text", "is_open", "thinking", "answer"),
    [
        ("<think>\nso\n</think>\n\nYes. ", False, "so", "Yes. "),
        (" \n<think>so", False, "so", ""),
        ("so it is </think> Yes", True, "so it is", "Yes"),
        ("never closed ", True, "never closed", ""),
        ("Yes, <think> is a tag", False, "", "Yes, <think> is a tag"),
        ("<thi", False, "", "<thi"),
        ("  Yes", False, "", "  Yes"),
        ("<think></think>Yes</think>", False, "", "Yes</think>"),
    ],
)
def test_thinking_is_what_comes_first(text: str, is_open: bool, thinking: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        assert _result(ThinkingParser(None, is_open), pieces) == (answer, thinking, [])


def test_calls_follow_thinking() -> None:
    text = '<think>a <tool_call> perhaps</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'

    assert _result(PARSERS["thinking, hermes"](), [text]) == ("", "a <tool_call> perhaps", [["id0", "f", "{}"]])


WORDS = [
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
    *('{"name": "f", "arguments": {"a": "x\\"}"}}', '{"name": "get_weather", "parameters": {}}', '{"arguments": [1,'),
    *(
        "[",
        "]",
        "{",
        "}",
        ",",
        ";",
        ":",
        '"',
        "\\",
        " ",
        "\n",
        "f",
        "name",
        '"name"',
        '"f"',
        "5",
        "null",
        "<",
        "word é",
    ),
]


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(PARSERS)),
    words=st.lists(st.sampled_from(WORDS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=10),
)
@example(name="thinking goes on", words=["<", " ", "<tool_call>"], cuts=[])
def test_any_split_of_any_text_gives_the_same(name: str, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(edges)]

    whole = _result(PARSERS[name](), [text])

    assert _result(PARSERS[name](), pieces) == whole
    assert _result(PARSERS[name](), list(text)) == whole


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    tool=st.sampled_from(sorted(NAMES)),
    arguments=st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
    is_compact=st.booleans(),
)
def test_what_a_format_writes_it_reads(name: str, tool: str, arguments: dict[str, str], is_compact: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=False, separators=(",", ":") if is_compact else None)
    text = FORMATS[name].call_text(tool, written)

    content, _, [[_, read_tool, read_arguments]] = _result(FORMATS[name].parser(NAMES), [text])

    assert (content, read_tool, json.loads(read_arguments)) == ("", tool, arguments)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_s_grammar_allows_its_calls_and_nothing_else(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [Tool("get_weather", "", schema), Tool("f", "", {"type": "object", "additionalProperties": False})]
    tokenizer = llguidance.LLTokenizer("byte")
    form = FORMATS[name].form(tools, 2, quoted)

    def accepts(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, constraint_of(form), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    good = FORMATS[name].call_text("get_weather", '{"city": "Rome"}')
    assert accepts(good)
    assert accepts(FORMATS[name].call_text("f", "{}"))
    assert not accepts("Rome is sunny.")
    assert not accepts(FORMATS[name].call_text("get_weather", '{"town": "Rome"}'))
    assert not accepts(FORMATS[name].call_text("g", "{}"))
    assert not accepts(good + good + good)
