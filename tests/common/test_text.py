"""Text and ids are turned into each other as transformers does it, and piece by piece as at once."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, InvalidRequestError
from common.text import Text
from common.tiny_text import write_tokenizer

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 你好 🙂\n\n"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<|im_end|> hello"},
        {"role": "user", "content": " "},
    ],
]
TEXTS = ["hello world", " a  b\t\n", "Grüße, 你好世界 🙂🙃", "<|im_start|>user", "", "don't stop"]


@pytest.fixture(params=["tiny_dir", "demo_dir"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


def theirs(model_dir: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.slow  # the import of transformers alone takes seconds
def test_ids_texts_and_chats_equal_transformers(model_dir: Path) -> None:
    ours, reference = Text.load(model_dir), theirs(model_dir)

    for text in TEXTS:
        ids = reference.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)
    for conversation in CONVERSATIONS:
        for add in (True, False):
            rendered = reference.apply_chat_template(conversation, add_generation_prompt=add, tokenize=False)
            ids = reference.encode(rendered, add_special_tokens=False)
            assert ours.render_chat(conversation, add_generation_prompt=add) == ids


def test_other_threads_run_while_a_long_text_is_encoded(model_dir: Path) -> None:
    text, is_over = Text.load(model_dir), threading.Event()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not is_over.wait(0.001):
            ticks += 1

    with ThreadPoolExecutor(1) as pool:
        ticking = pool.submit(tick)
        before = ticks
        text.encode("🙂" * 100_000)
        meanwhile = ticks - before
        is_over.set()
        ticking.result()

    assert meanwhile >= 5


def test_pieces_of_random_ids_give_the_text_of_all(model_dir: Path) -> None:
    text, draw = Text.load(model_dir), random.Random(0)

    for _ in range(300):
        ids = [draw.randrange(text.vocab_tokens) for _ in range(draw.randrange(40))]
        detokenizer, out, rest = text.detokenizer(), "", ids
        while rest:
            count = draw.randrange(1, 5)
            out, rest = out + detokenizer.push(rest[:count]), rest[count:]

        assert out + detokenizer.finish() == text.decode(ids)


@settings(max_examples=50)
@given(content=st.text(max_size=60))
def test_tokens_of_any_text_come_back_as_that_text(tiny: Text, content: str) -> None:
    detokenizer = tiny.detokenizer()
    ids = tiny.encode(content)

    out = "".join(detokenizer.push([token_id]) for token_id in ids)

    assert out == tiny.decode(ids)
    assert detokenizer.finish() == ""


def sentencepiece_like(folder: Path) -> Text:
    """A tokenizer as Llama 2's and Gemma's: words begin with a mark, unknown characters fall back to bytes."""
    vocabulary = {"<unk>": 0, "</s>": 1}
    vocabulary |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocabulary |= {word: 258 + i for i, word in enumerate(["▁", "▁hello", "▁world", "a", "b", "!"])}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Text.load(folder)


@settings(max_examples=60)
@given(draw=st.randoms(use_true_random=False))
def test_byte_fallback_in_any_pieces_gives_the_text_of_all(
    tmp_path_factory: pytest.TempPathFactory, draw: random.Random
) -> None:
    text = sentencepiece_like(tmp_path_factory.getbasetemp())
    parts = [[259], [260], [261], [263], [1], *([2 + byte for byte in c.encode()] for c in "é你🙂")]
    ids = [token_id for _ in range(draw.randrange(12)) for token_id in draw.choice(parts)]
    detokenizer, out, rest = text.detokenizer(), "", ids
    while rest:
        count = draw.randrange(1, 4)
        out, rest = out + detokenizer.push(rest[:count]), rest[count:]

    assert out + detokenizer.finish() == text.decode(ids)


def test_a_prompt_is_never_cut_or_padded(tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    text = Text.load(tmp_path)

    assert text.decode(text.encode("hello world, hello world")) == "hello world, hello world"


def test_one_token_has_a_text_of_its_own_even_if_special(tiny: Text) -> None:
    assert tiny.token(3) == "<|im_end|>"
    assert tiny.decode([3]) == ""


def test_an_id_that_nobody_knows_has_no_text(tiny: Text) -> None:
    detokenizer = tiny.detokenizer()

    assert detokenizer.push([100_000]) + detokenizer.finish() == tiny.decode([100_000]) == ""


def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    text = Text.load(tmp_path)

    assert not text.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        text.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("content", "part"),
    [
        pytest.param(None, r"tokenizer\.json is missing", id="missing"),
        pytest.param("{", r"tokenizer\.json", id="not JSON"),
        pytest.param(json.dumps({"model": {"type": "Nobody"}}), r"tokenizer\.json", id="not a tokenizer"),
    ],
)
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str | None, part: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(ConfigError, match=part):
        Text.load(tmp_path)
