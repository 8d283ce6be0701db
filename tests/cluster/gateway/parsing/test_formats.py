"""A model's template tells how it writes calls and thinking; markers that are special tokens are seen all the same."""

import random
from pathlib import Path

import llguidance
import pytest
from tokenizers import Tokenizer, decoders

from cluster.gateway.parsing.formats import Formats, Thinking
from cluster.gateway.parsing.hermes import HermesFormat
from cluster.gateway.parsing.interface import Parsed, Tool
from cluster.gateway.parsing.llama3 import Llama3Format
from cluster.gateway.parsing.mistral import MistralFormat
from cluster.gateway.tool_use import ToolUse
from common.chat_template import ChatTemplate
from common.grammar import Form, constraint_of
from common.text import Text
from common.tiny_text import write_tokenizer

USE = ToolUse((Tool("f", "", {"type": "object", "additionalProperties": False}),), False, None, 2)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the markers as special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<think>", "</think>"])
    tokenizer.save(str(path))
    return path


def _text(path: Path, template: str = "", is_byte_level: bool = True) -> Text:
    tokenizer = Tokenizer.from_file(str(path))
    if not is_byte_level:  # the same, in a way that Text does not recognize
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return Text(tokenizer, ChatTemplate(template, {}))


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ '<tool_call>' }}", HermesFormat),
        ("{{ '[TOOL_CALLS]' }}", MistralFormat),
        ("{{ '<|python_tag|>' }}", Llama3Format),
        ("{% if role == 'ipython' %}{% endif %}", Llama3Format),
        ("{{ messages }}", HermesFormat),
    ],
)
def test_the_template_tells_the_format_of_calls(tokenizer_file: Path, template: str, wanted: type) -> None:
    assert type(Formats(_text(tokenizer_file, template)).tools) is wanted
    assert type(Formats(_text(tokenizer_file, template), tools="llama3").tools) is Llama3Format


@pytest.mark.parametrize("is_byte_level", [True, False], ids=["bytes", "window"])
def test_special_markers_are_seen_and_other_special_tokens_are_not(tokenizer_file: Path, is_byte_level: bool) -> None:
    text = _text(tokenizer_file, "[TOOL_CALLS]<think>", is_byte_level)
    reading = Formats(text).reading(USE, Thinking.POSSIBLE)
    said = '<think>né 你</think>Hm. <|im_start|>[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    ids = text.encode(said, add_special_tokens=False)
    rng = random.Random(1)
    assert reading.parser is not None
    detokenizer, parsed = text.detokenizer((), reading.shown), Parsed()

    while ids:
        count = rng.randint(1, 3)
        parsed += reading.parser.push(detokenizer.push(ids[:count]))
        ids = ids[count:]
    parsed += reading.parser.push(detokenizer.finish()) + reading.parser.finish()

    assert (parsed.text, parsed.reasoning) == ("Hm.", "né 你")
    assert [(piece.index, piece.name) for piece in parsed.calls if piece.name] == [(0, "f")]
    assert "".join(piece.arguments for piece in parsed.calls) == "{}"


def test_a_grammar_names_special_markers_by_their_tokens(tokenizer_file: Path) -> None:
    text = _text(tokenizer_file, "[TOOL_CALLS]<think>")
    formats = Formats(text)
    tokenizer = llguidance.LLTokenizer(str(tokenizer_file), eos_token=[0])

    def accepts(form: Form, said: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, constraint_of(form), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(text.encode(said, add_special_tokens=False)) and matcher.is_accepting()

    calls = formats.tools.form(USE.tools, 1, formats.lark_of)
    call = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    assert accepts(calls, call)
    assert not accepts(calls, call.removeprefix("[TOOL_CALLS]"))
    assert accepts(formats.with_thinking(calls, Thinking.POSSIBLE), call)
    assert accepts(formats.with_thinking(calls, Thinking.POSSIBLE), f"<think>so\n</think>\n{call}")
    assert accepts(formats.with_thinking(calls, Thinking.OPEN), f"so</think>{call}")
    assert not accepts(formats.with_thinking(calls, Thinking.OPEN), call)
    assert not accepts(formats.with_thinking(calls, Thinking.DONE), f"<think>so</think>{call}")


def test_where_the_prompt_ends_tells_whether_the_model_thinks(tokenizer_file: Path) -> None:
    text = _text(tokenizer_file, "<think>")
    ends = {"hello": Thinking.POSSIBLE, "hello<think>\n": Thinking.OPEN, "a<think>\n\n</think>\n\n": Thinking.DONE}

    for prompt, thinking in ends.items():
        ids = text.encode(prompt, add_special_tokens=False)
        assert Formats(text).thinking_after(ids) is thinking
        assert Formats(text, thinking="none").thinking_after(ids) is Thinking.NEVER
    assert Formats(_text(tokenizer_file, "plain")).thinking_after([5]) is Thinking.NEVER
