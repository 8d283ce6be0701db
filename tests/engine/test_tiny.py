"""Tiny models are the same each time, and tokenizers of other libraries read what they come with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer

from common.tiny_text import VOCAB_TOKENS
from engine.tiny import make_tiny_model


def test_family_and_seed_fix_the_weights(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again")
    other = make_tiny_model(tmp_path / "other", seed=1)

    weights = (tiny_model("llama") / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


@pytest.mark.parametrize("text", ["hello world", "Grüße, 你好 🙂", "a\n\tb  c", "2+2=4"])
def test_any_text_survives_the_tokenizer(tiny_model: Callable[[str], Path], text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))

    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids) == text
    assert max(ids) < VOCAB_TOKENS == tokenizer.get_vocab_size()


def test_the_chat_template_ends_with_the_assistants_turn(tiny_model: Callable[[str], Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model("llama"))

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )

    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
