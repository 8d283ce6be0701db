"""A template renders as in transformers, and can neither break out nor break the gateway."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.chat_template import ChatTemplate
from common.errors import ConfigError, InvalidRequestError

MESSAGES = [{"role": "user", "content": "hi <b>"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("{{ bos_token }}{{ messages[0]['content'] }}", "<s>hi <b>", id="special tokens, no escaping"),
        pytest.param("{{ messages | tojson }}", '[{"role": "user", "content": "hi <b>"}]', id="tojson"),
        pytest.param(
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1", id="break"
        ),
        pytest.param("  {% if true %}\n  x\n  {% endif %}\n", "  x\n", id="blocks are trimmed"),
        pytest.param("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2", id="namespace"),
        pytest.param("{{ dict(a=1) }}", "{'a': 1}", id="dict"),
        pytest.param("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user", id="generation"),
        pytest.param("{{ tools is none }}{{ documents is none }}", "TrueTrue", id="absent variables"),
        pytest.param("{{ strftime_now('%Y') | length }}", "4", id="date"),
        pytest.param("{{ add_generation_prompt }}{{ extra }}", "Truemore", id="extra variables"),
    ],
)
def test_templates_find_what_they_expect(source: str, expected: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, extra="more") == expected


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", id="by its own words"),
        pytest.param("{{ messages[0].content + 1 }}", id="by a type error"),
        pytest.param("{{ messages[7].content.x }}", id="by a missing message"),
        pytest.param("{{ ''.__class__.__mro__ }}", id="breaking out of a string"),
        pytest.param("{{ messages.append(1) }}", id="changing its input"),
        pytest.param("{% set ns = namespace(__class__=1) %}{{ ns }}", id="breaking out of a namespace"),
        pytest.param("{{ (1).__class__.__base__.__subclasses__() }}", id="breaking out of a number"),
        pytest.param("{{ 1 / 0 }}", id="by arithmetic"),
        pytest.param("{% for i in range(1000000000) %}x{% endfor %}", id="by a range without end"),
    ],
)
def test_what_a_template_cannot_do_is_the_requests_fault(source: str) -> None:
    template = ChatTemplate(source, {})

    with pytest.raises(InvalidRequestError, match="chat template"):
        template.render(MESSAGES)


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(MESSAGES)


def test_a_template_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("\n{% if %}", {})


@pytest.mark.parametrize(
    ("settings", "file", "expected"),
    [
        pytest.param({"chat_template": "a"}, None, "a", id="in the settings"),
        pytest.param({"chat_template": "a"}, "b", "b", id="a file of its own wins"),
        pytest.param(
            {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]},
            None,
            "d",
            id="the default of several",
        ),
        pytest.param(
            {"chat_template": "{{ eos_token }}", "eos_token": {"content": "</s>"}}, None, "</s>", id="long form"
        ),
    ],
)
def test_a_template_is_found(tmp_path: Path, settings: dict[str, Any], file: str | None, expected: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)

    template = ChatTemplate.load(tmp_path)

    assert template is not None
    assert template.render(MESSAGES) == expected


def test_no_template_is_no_error(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))

    with pytest.raises(ConfigError, match="chat_template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "text", "prompt"),
    [
        ("{{ messages[0].content }}<{{ add_generation_prompt }}>", "Sure, ", "Sure, "),
        ("{{ messages[0].content | trim }}<{{ add_generation_prompt }}>", " Sure, ", "Sure,"),
        ("{{ messages[0].content }}|{{ messages[0].content }}!", "a", "a|a"),
    ],
    ids=["as it is", "trimmed", "the last one"],
)
def test_a_prompt_that_continues_a_message_ends_with_its_text(source: str, text: str, prompt: str) -> None:
    messages = [{"role": "assistant", "content": text}]

    assert ChatTemplate(source, {}).render(messages, continue_final_message=True) == prompt


@pytest.mark.parametrize("text", ["", "  ", "hidden"])
def test_a_message_without_text_in_the_prompt_cannot_be_continued(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="continue_final_message must have"):
        ChatTemplate("nothing of it", {}).render([{"role": "user", "content": text}], continue_final_message=True)
